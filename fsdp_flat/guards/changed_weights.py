"""Finds weights that were changed between a forward and its backward."""

from __future__ import annotations

from fsdp_flat.core import Guard, Unit, WeightsVersion
from fsdp_flat.errors import PhaseError, UsageError


class ChangedWeights(Guard):
    """Refuses a backward whose gradients would mix two sets of weights."""

    def before_backward(self, unit: Unit, weights: WeightsVersion, current: WeightsVersion) -> None:
        """Raise if weights were changed after the forward of this backward.

        Raises:
            UsageError: the unit was converted to another dtype or device.
            PhaseError: an optimizer step, a load or a write changed its weights.
        """
        if weights.storage_epoch != current.storage_epoch:
            raise UsageError(
                f"Unit {unit.name!r} was converted (.to, .float, .cuda, or an assignment to its flat parameter) after "
                "the forward of this backward, whose buffers are gone. Convert between steps."
            )
        if weights.weights_epoch != current.weights_epoch:
            raise PhaseError(
                f"The weights of unit {unit.name!r} were changed after the forward of this backward (by an optimizer "
                "step, load_state_dict, summon_full_params or an assignment), so its gradients would mix two sets of "
                "weights. Run backward before changing weights, or forward again after it."
            )
