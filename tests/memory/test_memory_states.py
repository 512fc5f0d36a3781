"""The states of a unit's memory: every state and event either moves or raises."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fsdp_flat import ShardingStrategy, register_forward_method
from fsdp_flat.core import units_of
from fsdp_flat.core.memory import TRANSITIONS, MemoryEvent, MemoryState
from fsdp_flat.core.unit import own_unit
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import batch, wrapped
from tests.support.models import Block

S, E = MemoryState, MemoryEvent


def test_each_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) == set(S)
    assert {state for state, event in TRANSITIONS if event is not E.ABORT} == set(S)


def test_an_all_gather_begins_only_where_none_is_in_flight_or_complete() -> None:
    assert {state for state, event in TRANSITIONS if event is E.GATHER} == {S.SHARDED, S.SHARDED_POST_FORWARD}


def test_parameters_are_ready_only_after_an_all_gather_or_where_they_were_kept() -> None:
    assert {event for (_, event), after in TRANSITIONS.items() if after is S.UNSHARDED} == {E.WAIT, E.REUSE}


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


class Generating(nn.Module):
    """Has a method that disables gradients, as ``generate`` of language models."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


@on_ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_a_method_without_gradients_leaves_nothing_unsharded(strategy: ShardingStrategy) -> None:
    model = wrapped(Generating(), auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=strategy)
    register_forward_method(model, "generate")
    model.generate(batch(0))
    assert {unit.state for unit in units_of(model)} == {S.SHARDED}
    loss = model(batch(0)).sum()
    model.generate(batch(0))
    loss.backward()
    assert {unit.state for unit in units_of(model)} == {S.SHARDED}
