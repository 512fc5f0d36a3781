"""The states of a unit's memory: every state and event either moves or raises."""

from __future__ import annotations

import itertools

import pytest

from fsdp_flat.runtime.memory import TRANSITIONS, MemoryEvent, MemoryState
from fsdp_flat.runtime.unit import own_unit
from tests.support import on_ranks
from tests.support.kit import Block, wrapped

S, E = MemoryState, MemoryEvent


def test_each_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) == set(S)
    assert {state for state, event in TRANSITIONS if event is not E.ABORT} == set(S)


def test_an_all_gather_begins_only_where_none_is_in_flight_or_complete() -> None:
    assert {state for state, event in TRANSITIONS if event is E.GATHER} == {S.SHARDED, S.SHRUNK}


def test_parameters_are_ready_only_after_an_all_gather_or_where_they_were_kept() -> None:
    assert {event for (_, event), after in TRANSITIONS.items() if after is S.READY} == {E.FINISH, E.REUSE}


@on_ranks(1)
def test_an_event_that_a_state_does_not_know_raises_and_changes_nothing(rank: int) -> None:
    unit = own_unit(wrapped(Block()))
    for state, event in itertools.product(S, E):
        unit.state = state
        if (state, event) in TRANSITIONS:
            unit._move(event)
            assert unit.state is TRANSITIONS[state, event]
        else:
            with pytest.raises(KeyError):
                unit._move(event)
            assert unit.state is state
    unit.state = S.SHARDED
