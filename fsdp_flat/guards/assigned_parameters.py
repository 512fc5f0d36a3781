"""Finds what a program assigned to parameters of a unit whose unsharded parameters are in memory."""

from __future__ import annotations

from fsdp_flat.core import Guard, MemoryState, Unit


class AssignedParameters(Guard):
    """Refuses assigned parameters that would be lost, since the unsharded ones do not have the values."""

    def before_reuse(self, unit: Unit) -> None:
        """Raise a PhaseError if a parameter was assigned while the unsharded parameters were in memory."""
        for param_group in unit.param_groups:
            param_group.shown.check_not_assigned(shows_unsharded=unit.state is MemoryState.UNSHARDED)
