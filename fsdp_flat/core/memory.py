"""Defines the states of a unit's memory, and the events that change the state."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class MemoryState(Enum):
    """Enumerates what a unit's buffers hold, and what its modules point at.

    Modules point at the unsharded parameters in UNSHARDED, and at the sharded ones in every other state.
    """

    SHARDED = "the buffers are freed"
    GATHERING = "an all-gather into the buffers is in flight"
    UNSHARDED = "the buffers hold all parameters, and the modules point at them"
    RETAINED_POST_FORWARD = "a forward has kept the buffers for its backward"
    SHARDED_POST_FORWARD = "the buffers are freed, and smaller groups keep all shards for backward"
    RETAINED_POST_BACKWARD = "a backward has kept the buffers for the next forward, or for a backward through its graph"


class MemoryEvent(Enum):
    """Enumerates what happens to a unit's memory."""

    GATHER = "an all-gather begins"
    WAIT = "the all-gather is complete"
    RETAIN_POST_FORWARD = "a forward ends; the next unit's all-gather begins before the buffers are freed"
    RETAIN_POST_BACKWARD = "a backward ends, and the caller wants no other all-gather"
    REUSE = "the buffers are used again as they are"
    SHARD_POST_FORWARD = "each rank copies the shards that it keeps for a smaller group"
    FREE = "the buffers, or the shards that a smaller group keeps, are freed"
    ABORT = "a step raised an exception"


_State, _Event = MemoryState, MemoryEvent
TRANSITIONS = {
    (_State.SHARDED, _Event.GATHER): _State.GATHERING,
    (_State.SHARDED_POST_FORWARD, _Event.GATHER): _State.GATHERING,
    (_State.GATHERING, _Event.WAIT): _State.UNSHARDED,
    (_State.UNSHARDED, _Event.RETAIN_POST_FORWARD): _State.RETAINED_POST_FORWARD,
    (_State.UNSHARDED, _Event.RETAIN_POST_BACKWARD): _State.RETAINED_POST_BACKWARD,
    (_State.RETAINED_POST_FORWARD, _Event.REUSE): _State.UNSHARDED,
    (_State.RETAINED_POST_BACKWARD, _Event.REUSE): _State.UNSHARDED,
    (_State.RETAINED_POST_FORWARD, _Event.SHARD_POST_FORWARD): _State.SHARDED_POST_FORWARD,
    (_State.UNSHARDED, _Event.FREE): _State.SHARDED,
    (_State.RETAINED_POST_FORWARD, _Event.FREE): _State.SHARDED,
    (_State.SHARDED_POST_FORWARD, _Event.FREE): _State.SHARDED,
    (_State.RETAINED_POST_BACKWARD, _Event.FREE): _State.SHARDED,
    **dict.fromkeys([(state, _Event.ABORT) for state in _State], _State.SHARDED),
}
"""The next state by state and event. A missing pair raises a KeyError: a defect of this library."""


class WeightsVersion(NamedTuple):
    """Identifies the weights that buffers hold, or that a forward computed with; its backward needs the same weights.

    Attributes:
        full_precision: unsharded parameters have the dtype of the shards, not the low-precision dtype.
        storage_epoch: number of replacements of shards, and so of buffers (``.to(dtype)``); the three are sums over
            the parameter groups.
        weights_epoch: increases with changes of this rank's shard values. A backward needs that of its forward.
        num_updates: number of events after which shards of any rank may have other values, the same on all ranks (an
            optimizer's step, a write-back). A forward needs the current one, so that all ranks all-gather again if one
            has to.
    """

    full_precision: bool
    storage_epoch: int
    weights_epoch: int
    num_updates: int
