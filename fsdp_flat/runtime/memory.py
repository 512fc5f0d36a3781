"""Defines the states of a unit's memory, and the events that change the state."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class MemoryState(Enum):
    """Enumerates what a unit's buffers hold, and what its modules point at.

    Modules point at the unsharded parameters in READY, and at the sharded ones in every other state.
    """

    SHARDED = "the buffers are freed"
    GATHERING = "an all-gather into the buffers is in flight"
    READY = "the buffers hold all parameters, and the modules point at them"
    PARKED = "a forward has kept the buffers for its backward"
    SHRUNK = "the buffers are freed, and smaller groups keep all shards for backward"
    KEPT = "a backward has kept the buffers for the next forward, or for another backward through its graph"


class MemoryEvent(Enum):
    """Enumerates what happens to a unit's memory."""

    GATHER = "an all-gather begins"
    FINISH = "the all-gather is complete"
    PARK = "a forward ends, and its backward is near"
    KEEP = "a backward ends, and the caller wants no other all-gather"
    REUSE = "the buffers are used again as they are"
    SHRINK = "each rank copies the shards that it keeps for a smaller group"
    FREE = "the buffers, or the shards that a smaller group keeps, are freed"
    ABORT = "a step raised an exception"


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
"""The next state by state and event. A missing pair raises a KeyError: a defect of this library."""


class WeightsVersion(NamedTuple):
    """Identifies the weights that buffers hold, or that a forward computed with; its backward needs the same weights.

    Attributes:
        full_precision: unsharded parameters have the dtype of the shards, not the low-precision dtype.
        storage_epoch: number of replacements of shards, and so of buffers (``.to(dtype)``); summed over handles.
        weights_epoch: increases with changes of this rank's shard values; summed over handles. A backward needs that of
            its forward.
        num_updates: number of events after which shards of any rank may have other values, the same on all ranks (an
            optimizer's step, a write-back); summed over handles. A forward needs the current one, so that all ranks
            all-gather again if one has to.
    """

    full_precision: bool
    storage_epoch: int
    weights_epoch: int
    num_updates: int
