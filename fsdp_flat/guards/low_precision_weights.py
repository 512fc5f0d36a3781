"""Finds weights that are stored in low precision, where an optimizer loses small updates, and inputs of no forward."""

from __future__ import annotations

from fsdp_flat.core import Iteration, Step
from fsdp_flat.core.casts import forward_parameters
from fsdp_flat.guards.once_a_tree import OnceATree
from fsdp_flat.user_warnings import warn_user


class LowPrecisionWeights(OnceATree):
    """Warns, once the first reduced gradients exist, of trained shards of fewer than 4 bytes an element."""

    def after_reduce(self, step: Step) -> None:
        """Warn of the first such parameter."""
        if not self.is_first(step):
            return
        param_groups = [param_group for unit in step.units for param_group in unit.param_groups]
        short = next((each for each in param_groups if each.slots.num_trainable and each.orig_dtype.itemsize < 4), None)
        if short is not None:
            warn_user(
                f"{short.layout.param_infos[0].fqn!r} of unit {short.spec.unit_name!r} is sharded in "
                f"{short.orig_dtype}, so an optimizer keeps its state and makes its updates in it too, where small "
                "updates are lost. Convert the model to torch.float32 before it is sharded, and compute in low "
                "precision by param_dtype; or pass MixedPrecision(master_dtype=torch.float32) to "
                "FullyShardedDataParallel."
            )


class UncastInputs(OnceATree):
    """Warns, at the first forward of a tree, of inputs to leave in full precision that no forward has."""

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Warn of a name in ``uncast_inputs`` that no forward of a unit takes."""
        if not self.is_first(step):
            return
        wanted = {name for unit in step.units for name in unit.options.precision.uncast_inputs}
        taken = [each for unit in step.units for member in unit.members for each in forward_parameters(member).values()]
        unknown = sorted(wanted - {each.name for each in taken})
        if unknown and all(each.kind is not each.VAR_KEYWORD for each in taken):
            warn_user(
                f"MixedPrecision.uncast_inputs names {unknown[0]!r}, and no forward of a unit has an argument of that "
                "name, so it leaves nothing in full precision. Name an argument of a unit's forward."
            )
