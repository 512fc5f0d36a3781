"""What the step is doing with a unit: its phase, and each of its forwards that a backward may come back to."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_flat.runtime.tree import Pass
    from fsdp_flat.runtime.unit import Unit

__all__ = ["Phase", "Use"]


class Phase(Enum):
    """What the step is doing with a unit."""

    IDLE = "idle"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    SUMMONED = "inside summon_full_params"


class Use:
    """One forward of a unit whose outputs may come back in backward.

    Attributes:
        unit: the unit.
        record: the pass of the tree in which it happened; None when recomputed inside backward.
        position: index of this use among the uses of that pass.
        waits_for_inputs: the use ends when the gradients of its inputs are there, not with its parameters'.
        task: id of the backward pass in which it became active, -1 before.
        full_precision: it ran in full precision, so its backward does.
        generation: that of the unit at that time.
        version: that of the weights that it ran with.
    """

    __slots__ = ("full_precision", "generation", "position", "record", "task", "unit", "version", "waits_for_inputs")

    def __init__(self, unit: Unit, record: Pass | None) -> None:
        self.unit = unit
        self.record = record
        self.position = -1
        self.waits_for_inputs = False
        self.task = -1
        self.full_precision = unit.wants_full_precision
        self.generation = unit.generation
        self.version = 0
