"""Finds what a program assigned to parameters of a unit whose unsharded parameters are in memory."""

from __future__ import annotations

from fsdp_flat.core import Guard, Unit
from fsdp_flat.errors import PhaseError

_UNSHARDED = (
    "after a forward, while the unit was unsharded, and the assignment would be lost. The weights were changed before "
    "the backward of that forward, or without one. Assign between steps, after backward, or inside summon_full_params."
)
_KEPT_UNSHARDED = (
    "while the unit was kept unsharded after backward, and the assignment would be lost. Call reshard() of its module "
    "on every rank, now or before assignments, or do not keep parameters (set_reshard_after_backward, SHARD_GRAD_OP in "
    "no_sync)."
)


class AssignedParameters(Guard):
    """Refuses assigned parameters that would be lost, since the unsharded ones do not have the values."""

    def before_reuse(self, unit: Unit) -> None:
        """Raise a PhaseError if a parameter was assigned while the unsharded parameters were in memory."""
        for param_group in unit.param_groups:
            slots = param_group.slots
            changes = slots.diff()
            for index in (*changes.assigned, *changes.data):
                when = _UNSHARDED if slots.shows_unsharded else _KEPT_UNSHARDED
                raise PhaseError(f"Parameter {slots.describe(index)} was assigned {when}")
