"""Finds parameters that a forward has changed while they were unsharded."""

from __future__ import annotations

from fsdp_flat.core import Guard, UnitForward


class ChangedParameters(Guard):
    """Refuses changes of unsharded parameters, which a reshard would lose."""

    def after_compute(self, forward: UnitForward) -> None:
        """Raise a UsageError if the computation has changed parameters."""
        for param_group in forward.unit.param_groups:
            param_group.slots.check_unchanged(forward.changed.get(param_group, ()))
