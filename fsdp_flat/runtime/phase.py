"""Defines the states of a unit: its phase, the weights that a forward ran with, and full parameters while shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from fsdp_flat.flat import FlatParamHandle


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


@dataclass(frozen=True, slots=True)
class FullParams:
    """Holds the full parameters of one unit inside :func:`full_params`.

    Attributes:
        by_handle: for each handle its unsharded flat tensor (1-D, ``layout.numel``, original dtype).
        is_shown: the modules point at them.
    """

    by_handle: dict[FlatParamHandle, torch.Tensor]
    is_shown: bool
