"""Finds weights that are stored in low precision, where an optimizer loses small updates."""

from __future__ import annotations

from fsdp_flat.core import Step
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
