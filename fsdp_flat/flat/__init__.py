"""Layer 1: manages the tensors of one process: module walk, flat buffers, views, gradients, the handle."""

from fsdp_flat.flat.buffers import MemoryPool
from fsdp_flat.flat.dtensor_handle import DTensorHandle
from fsdp_flat.flat.flat_parameter import FlatParameter
from fsdp_flat.flat.gradients import set_grad, without
from fsdp_flat.flat.handle import FlatParamHandle
from fsdp_flat.flat.handle_spec import HandleSpec
from fsdp_flat.flat.layout_views import VisibleParam
from fsdp_flat.flat.make_handle import make_handle
from fsdp_flat.flat.optimizer_grads import (
    add_reduced,
    grads_by_adapter,
    have_grads,
    restore_sharded_grad,
    sharded_grad_of,
    show_full_grads,
)
from fsdp_flat.flat.optimizers import check_whole, note_unwrapped
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
