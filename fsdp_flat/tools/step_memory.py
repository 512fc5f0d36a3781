"""Describes the memory of a rank at the moments of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum


class StepPhase(Enum):
    """Enumerates the parts of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class BytesByKind:
    """Counts the bytes of a rank that exist at one moment, by what they are for.

    Attributes:
        parameters: shards of parameters, parameters that no unit manages, and buffers.
        gathered: unsharded parameters, and memory of all-gathers in flight.
        gradients: gradients before, in and after their reduction.
        optimizer: states of the optimizer, and what its step allocates.
        activations: everything else: what forward keeps for backward, and temporary results of both.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class Moment:
    """Describes the memory at one moment of a step.

    Attributes:
        seconds: time since the begin of the step, by the speeds given.
        unit: the name of the unit that came last.
    """

    phase: StepPhase
    seconds: float
    unit: str
    nbytes: BytesByKind
