"""Defines the states of a unit's memory, and the events that move it from one to the next."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class MemoryState(Enum):
    """Enumerates what a unit's buffers hold, and what its modules point at.

    All but READY show the sharded parameters to modules, optimizers and state dicts.
    """

    SHARDED = "the buffers are freed"
    GATHERING = "an all-gather into the buffers is in flight"
    READY = "the buffers hold all parameters, and the modules point at them"
    PARKED = "the buffers are kept for the backward of the forward that has ended"
    SHRUNK = "the buffers are freed, and smaller groups keep the parameters for that backward"
    KEPT = "a backward has left the buffers for the next forward, or for another backward of its graph"


class MemoryEvent(Enum):
    """Enumerates what happens to a unit's memory."""

    GATHER = "an all-gather begins"
    FINISH = "the all-gather is complete"
    PARK = "a forward ends, and its backward is near"
    KEEP = "a backward ends, and the caller wants no other all-gather"
    REUSE = "the buffers are used again as they are"
    SHRINK = "smaller groups take what they keep"
    FREE = "the memory is freed"
    ABORT = "a step raised"


_State, _Event = MemoryState, MemoryEvent
TRANSITIONS = {
    (_State.SHARDED, _Event.GATHER): _State.GATHERING,
    (_State.SHRUNK, _Event.GATHER): _State.GATHERING,
    (_State.GATHERING, _Event.FINISH): _State.READY,
    (_State.READY, _Event.PARK): _State.PARKED,
    (_State.READY, _Event.KEEP): _State.KEPT,
    (_State.PARKED, _Event.REUSE): _State.READY,
    (_State.KEPT, _Event.REUSE): _State.READY,
    (_State.PARKED, _Event.SHRINK): _State.SHRUNK,
    (_State.READY, _Event.FREE): _State.SHARDED,
    (_State.PARKED, _Event.FREE): _State.SHARDED,
    (_State.SHRUNK, _Event.FREE): _State.SHARDED,
    (_State.KEPT, _Event.FREE): _State.SHARDED,
    **dict.fromkeys([(state, _Event.ABORT) for state in _State], _State.SHARDED),
}
"""The state after each event; an event that is missing for a state is a defect of this library."""


class WeightsVersion(NamedTuple):
    """Identifies the values that buffers hold, or that a forward computed with; its backward needs the same.

    Attributes:
        full_precision: they are in the original dtype.
        storage_epoch: counts replacements of the shards (``.to(dtype)``), and with them of the buffers.
        weights_epoch: counts changes of their values.
    """

    full_precision: bool
    storage_epoch: int
    weights_epoch: int
