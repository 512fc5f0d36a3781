"""Runs a unit's step (layer 2): build, forward, backward, order and prefetch, and full parameters."""

from fsdp_flat.runtime.build import handles_of, owners_of_ties
from fsdp_flat.runtime.compiled import hide_compiled_name
from fsdp_flat.runtime.construction import Arguments, build_rows, construct
from fsdp_flat.runtime.duplicate import convert_unit, copy_wrapper
from fsdp_flat.runtime.forward import forward
from fsdp_flat.runtime.ignored import resolve_ignored
from fsdp_flat.runtime.options import BackgroundWork, Ignored, UnitOptions, compute_device_from
from fsdp_flat.runtime.other_forwards import (
    UnshardHandle,
    participate,
    register_forward_method,
    run_module,
    unshard_for,
)
from fsdp_flat.runtime.phase import Phase
from fsdp_flat.runtime.precision import precision_from, precision_of_rows
from fsdp_flat.runtime.reduction import LOW_PRECISION_HOOKS
from fsdp_flat.runtime.reduction_settings import (
    clear_gradients,
    register_comm_hook,
    set_divide_factor_of_tree,
    set_reduce_scatter_divide_factor,
    without_reduction,
)
from fsdp_flat.runtime.schedule import Schedule, reset_schedule, schedule_of
from fsdp_flat.runtime.sharded_module import GradientReductionHandle, ShardedModule, share_comm_ctx
from fsdp_flat.runtime.smaller_group import SmallerGroup
from fsdp_flat.runtime.summon import check_idle, full_params, summon_full_params
from fsdp_flat.runtime.unit import Unit, own_unit, unit_of, units_of
from fsdp_flat.runtime.unmanaged import average_buffers
from fsdp_flat.runtime.unwrap import unwrap

__all__ = [
    "LOW_PRECISION_HOOKS",
    "Arguments",
    "BackgroundWork",
    "GradientReductionHandle",
    "Ignored",
    "Phase",
    "Schedule",
    "ShardedModule",
    "SmallerGroup",
    "Unit",
    "UnitOptions",
    "UnshardHandle",
    "average_buffers",
    "build_rows",
    "check_idle",
    "clear_gradients",
    "compute_device_from",
    "construct",
    "convert_unit",
    "copy_wrapper",
    "forward",
    "full_params",
    "handles_of",
    "hide_compiled_name",
    "own_unit",
    "owners_of_ties",
    "participate",
    "precision_from",
    "precision_of_rows",
    "register_comm_hook",
    "register_forward_method",
    "reset_schedule",
    "resolve_ignored",
    "run_module",
    "schedule_of",
    "set_divide_factor_of_tree",
    "set_reduce_scatter_divide_factor",
    "share_comm_ctx",
    "summon_full_params",
    "unit_of",
    "units_of",
    "unshard_for",
    "unwrap",
    "without_reduction",
]
