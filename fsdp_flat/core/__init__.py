"""Runs the step of units of parameters (layer 2): layouts, parameter groups, units, and the steps of a tree."""

from fsdp_flat.core.averages import unmanaged_params, unreduced_params
from fsdp_flat.core.backward import Iteration
from fsdp_flat.core.buffers import MemoryPool
from fsdp_flat.core.differences import TRAINED, trained_lines
from fsdp_flat.core.dtensor_plan import DTensorPlan
from fsdp_flat.core.flat_parameter import FlatParameter, set_grad
from fsdp_flat.core.forward import UnitForward, forward
from fsdp_flat.core.gather_targets import GatherTarget, GroupedTarget, PerParamTarget, join_inputs
from fsdp_flat.core.gradients import FlatGradBuffer, without
from fsdp_flat.core.group_collectives import SmallerGroup
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.guard import Guard, guards_in_use, use_guards
from fsdp_flat.core.inner_tensors import (
    assign,
    copy_of,
    inner_tensors,
    made_like,
    made_on,
    plain_tensors_in,
    seeded_alike,
)
from fsdp_flat.core.layout import FlatLayout, Layout, LocalShard, ParamInfo, PerParamLayout, alignment_numel
from fsdp_flat.core.memory import MemoryEvent, MemoryState, WeightsVersion
from fsdp_flat.core.optimizer_grads import (
    add_reduced,
    grads_by_adapter,
    have_grads,
    restore_sharded_grad,
    sharded_grad_of,
    show_full_grads,
)
from fsdp_flat.core.options import IN_PLACE, Ignored, Phase, UnitControl, UnitOptions
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.params import (
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
    is_managed,
    is_subclass,
    modules_of,
    owner_of,
    unsharded_shape,
)
from fsdp_flat.core.per_param_sharding import PerParamSharding
from fsdp_flat.core.placeholders import METADATA, SHARDED_HINTS, Placeholder, ShardedPlaceholder, creates
from fsdp_flat.core.reduction import predivide_factor
from fsdp_flat.core.step import Step, outermost_of, read_exchanges, read_exchanges_on, reset_step, step_of
from fsdp_flat.core.torch_core import (
    LOW_PRECISION_HOOKS,
    VERSION_OF,
    active_compiler,
    attributes_of,
    concatenated_mesh,
    cuda_memory_observer,
    dtensor_of,
    dynamo_disabled,
    dynamo_disabled_here,
    flattened_mesh,
    graph_task_id,
    has_values,
    is_alias,
    is_plain,
    is_replicated,
    keeps_graph,
    local_of,
    node_will_run,
    outside_fake_mode,
    place_of,
    pytree_children,
    unguarded,
    without_data,
)
from fsdp_flat.core.unit import (
    NOT_IN_USE,
    Unit,
    clear_hidden_gradients,
    no_units,
    own_unit,
    unit_of,
    units_holding,
    units_in_backward,
    units_of,
)
from fsdp_flat.core.visible_params import VisibleParam
