"""Layer 1: manages the tensors of one process: module walk, flat buffers, views, gradients, the parameter group."""

from fsdp_flat.flat.buffers import MemoryPool
from fsdp_flat.flat.flat_parameter import FlatParameter, set_grad
from fsdp_flat.flat.gradients import without
from fsdp_flat.flat.group_spec import ParamGroupSpec
from fsdp_flat.flat.layout_views import VisibleParam
from fsdp_flat.flat.optimizer_grads import (
    add_reduced,
    grads_by_adapter,
    have_grads,
    restore_sharded_grad,
    sharded_grad_of,
    show_full_grads,
)
from fsdp_flat.flat.optimizers import check_whole, note_unwrapped, watch_steps_on
from fsdp_flat.flat.param_group import ParamGroup
from fsdp_flat.flat.params import (
    PLAIN,
    DataParallelDims,
    DTensorAdapter,
    ManagedParam,
    Site,
    TensorAdapter,
    adapter_if_dtensor,
    adapter_of,
    check_adapter,
    check_module,
    collect_params,
    inside_wrappers,
    is_managed,
    modules_of,
    named_sites,
    owner_of,
    to_local_param,
    unsharded_shape,
)
from fsdp_flat.flat.placeholders import SHARDED_HINTS, ShardedPlaceholder
from fsdp_flat.flat.row_sharding import RowSharding
from fsdp_flat.flat.shown_dtensors import DTensorShown
from fsdp_flat.flat.torch_flat import (
    VERSION_OF,
    active_compiler,
    concatenated_mesh,
    dtensor_of,
    dynamo_disabled,
    dynamo_disabled_here,
    flattened_mesh,
    graph_task_id,
    has_values,
    is_alias,
    keeps_graph,
    local_of,
    node_will_run,
    outside_fake_mode,
    place_of,
    pytree_children,
    unguarded,
    without_data,
)
