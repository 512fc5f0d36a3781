"""Keeps what a program assigns to sharded parameters: ``module.weight = ...``, ``module.weight.data = ...``."""

from __future__ import annotations

from fsdp_flat.core import Guard, MemoryState, Unit


class AssignedParameters(Guard):
    """Copies assigned values to the shard before it is read, as FSDP1 does; raises where they would be lost."""

    def before_gather(self, unit: Unit) -> None:
        """Adopt tensors that the user assigned to sharded parameters.

        Raises:
            PhaseError: a parameter was assigned while the unsharded parameters were in memory: the buffers, which are
                used again, do not have the value.
            UsageError: a part of a flat parameter was assigned, or a tensor of another shape.
        """
        for param_group in unit.param_groups:
            if unit.state is MemoryState.UNSHARDED:
                param_group.shown.check_not_assigned(shows_unsharded=True)
            elif unit.state in (MemoryState.GATHERING, MemoryState.RETAINED_POST_BACKWARD):
                param_group.shown.check_not_assigned(shows_unsharded=False)
            else:
                param_group.adopt_changes()
