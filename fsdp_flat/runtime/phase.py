"""Defines the states of a unit within a step, and the identity of the weights that a forward ran with."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Phase", "Weights"]


class Phase(Enum):
    """Enumerates the states of a unit within a step."""

    IDLE = "idle"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    SUMMONED = "inside summon_full_params"


class Weights(NamedTuple):
    """Identifies the weights with which a forward ran; its backward needs the same.

    Attributes:
        full_precision: they were unsharded in the original dtype.
        storage_epoch: number of times that conversions had replaced the shards.
        version: a number that changes with their values.
    """

    full_precision: bool
    storage_epoch: int = -1
    version: int = -1
