"""Runs a unit's step (layer 2): build, forward, backward, order and prefetch, and full parameters."""

from fsdp_flat.flat.torch_flat import LOW_PRECISION_HOOKS, is_replicated
from fsdp_flat.runtime.averages import average_buffers, persistent_buffers, unmanaged_params, unreduced_params
from fsdp_flat.runtime.backward import Iteration
from fsdp_flat.runtime.build import build_rows, check_not_torchs, check_outside_units, handles_of, outer_holder_in
from fsdp_flat.runtime.checks import TRAINED, all_rank_groups, trained_lines
from fsdp_flat.runtime.compute_device import current_accelerator, default_device, devices_of
from fsdp_flat.runtime.construction import Arguments, construct, owners_of_ties, resolve_ignored
from fsdp_flat.runtime.forward import UnitForward, forward
from fsdp_flat.runtime.full_params import full_params, summon_full_params
from fsdp_flat.runtime.group_collectives import SmallerGroup
from fsdp_flat.runtime.group_settings import Settings, differing_settings, group_settings, param_groups_of
from fsdp_flat.runtime.guard import Guard, guards_in_use, use_guards
from fsdp_flat.runtime.memory import MemoryEvent, MemoryState, WeightsVersion
from fsdp_flat.runtime.options import (
    IN_PLACE,
    Ignored,
    Phase,
    UnitControl,
    UnitOptions,
    check_callable,
    listed,
    precision_from,
    precision_of_rows,
)
from fsdp_flat.runtime.other_forwards import (
    UnshardHandle,
    participate,
    register_forward_method,
    run_module,
    unshard_for,
)
from fsdp_flat.runtime.reduction import predivide_factor
from fsdp_flat.runtime.sharded_module import GradientReductionHandle, ShardedModule, require_root, share_comm_ctx
from fsdp_flat.runtime.step import Step, outermost_of, reset_step, step_of
from fsdp_flat.runtime.unit import (
    NOT_IN_USE,
    Unit,
    clear_hidden_gradients,
    no_units,
    own_unit,
    unit_of,
    units_holding,
    units_of,
)
from fsdp_flat.runtime.unit_settings import (
    register_comm_hook,
    replace_collectives,
    set_comm_hook,
    set_divide_factor_of_tree,
    without_reduction,
)
from fsdp_flat.runtime.unwrap import convert_unit, hide_compiled_name, unwrap
