"""Runs a unit's step (layer 2): build, forward, backward, order and prefetch, and full parameters."""

from fsdp_flat.comm import ErrorTexts, agree
from fsdp_flat.runtime.build import (
    agree_on_structure,
    build_unit,
    describe_structure,
    handles_of,
    own_buffers,
    owners_of_ties,
)
from fsdp_flat.runtime.compiled import hide_compiled_name
from fsdp_flat.runtime.duplicate import copy_unit
from fsdp_flat.runtime.forward import forward, participate, register_forward_method, unshard_for
from fsdp_flat.runtime.ignored import resolve_ignored
from fsdp_flat.runtime.materialize import agree_on_weights, materialize
from fsdp_flat.runtime.options import (
    BackgroundWork,
    Ignored,
    UnitOptions,
    compute_device_from,
    offloads_params,
    prefetch_from,
    sync_states_from,
)
from fsdp_flat.runtime.precision import keep_full_precision, precision_from
from fsdp_flat.runtime.reduction import LOW_PRECISION_HOOKS
from fsdp_flat.runtime.schedule import Schedule, reset_schedule, schedule_of
from fsdp_flat.runtime.summon import check_idle, full_params, summon_full_params
from fsdp_flat.runtime.unit import Phase, Unit, unit_of, units_of
from fsdp_flat.runtime.unmanaged import average_buffers
from fsdp_flat.runtime.unwrap import unwrap

__all__ = [
    "LOW_PRECISION_HOOKS",
    "BackgroundWork",
    "ErrorTexts",
    "Ignored",
    "Phase",
    "Schedule",
    "Unit",
    "UnitOptions",
    "agree",
    "agree_on_structure",
    "agree_on_weights",
    "average_buffers",
    "build_unit",
    "check_idle",
    "compute_device_from",
    "copy_unit",
    "describe_structure",
    "forward",
    "full_params",
    "handles_of",
    "hide_compiled_name",
    "keep_full_precision",
    "materialize",
    "offloads_params",
    "own_buffers",
    "owners_of_ties",
    "participate",
    "precision_from",
    "prefetch_from",
    "register_forward_method",
    "reset_schedule",
    "resolve_ignored",
    "schedule_of",
    "summon_full_params",
    "sync_states_from",
    "unit_of",
    "units_of",
    "unshard_for",
    "unwrap",
]
