"""Pain 36: weights that change between a forward and its backward raise, as in plain torch, instead of mixing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, StateDictType
from fsdp_flat.errors import PhaseError
from tests.support import on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside, batch
from tests.support.kit import square_loss
from tests.support.models import Stack
from tests.support.steps import STRATEGIES, mesh_for

SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP


def _load(beside: Beside) -> None:
    state = {name: value * 0.5 for name, value in beside.ours.state_dict().items()}
    beside.ours.load_state_dict(state)
    beside.plain.load_state_dict(state)


def _assign(beside: Beside) -> None:
    with torch.no_grad():
        for model in beside.models:
            for param in model.parameters():
                param.mul_(0.5)


def _write_back(beside: Beside) -> None:
    with torch.no_grad(), FSDP.summon_full_params(beside.ours):
        for mine, other in zip(beside.ours.parameters(), beside.plain.parameters(), strict=True):
            mine.copy_(other.mul_(0.5))


# With SHARD_GRAD_OP the gathered weights of the forward are still there after an optimizer step: see below.
CASES = [
    (change, strategy)
    for change in (_load, _assign, _write_back)
    for strategy in STRATEGIES
    if (change, strategy) != (_assign, SHARD_GRAD_OP)
]


@pytest.mark.of_guards
@WRAPPER_FRONTS
@on_ranks(2)
@pytest.mark.parametrize("change, strategy", CASES)
def test_a_backward_through_weights_that_changed_raises_and_the_next_step_is_right(
    change: Callable[[Beside], None], strategy: ShardingStrategy, front: str, rank: int
) -> None:
    beside = Beside(Stack(), front, sharding_strategy=strategy, **mesh_for(strategy))
    beside.train()
    beside.zero_grad()
    loss = square_loss(beside.ours, batch(rank))
    change(beside)
    with pytest.raises(PhaseError, match="were changed after the forward of this backward"):
        loss.backward()
    beside.zero_grad()
    beside.train()


@pytest.mark.of_guards
@WRAPPER_FRONTS
@on_ranks(2)
def test_a_backward_after_a_load_of_local_shards_raises(front: str, rank: int) -> None:
    beside = Beside(Stack(), front)
    with FSDP.state_dict_type(beside.ours, StateDictType.LOCAL_STATE_DICT):
        state = beside.ours.state_dict()
        loss = square_loss(beside.ours, batch(rank))
        beside.ours.load_state_dict(state)
    with pytest.raises(PhaseError, match="were changed after the forward of this backward"):
        loss.backward()


@WRAPPER_FRONTS
@on_ranks(2)
def test_weights_kept_gathered_give_the_gradient_of_their_forward(front: str, rank: int) -> None:
    gradients = []
    for change in (False, True):
        torch.manual_seed(0)
        beside = Beside(Stack(), front, sharding_strategy=SHARD_GRAD_OP)
        loss = square_loss(beside.ours, batch(rank))
        if change:
            _assign(beside)
        loss.backward()
        gradients.append([param.grad.clone() for param in beside.ours.parameters() if param.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@WRAPPER_FRONTS
@on_ranks(2)
def test_looking_at_whole_parameters_between_forward_and_backward_changes_nothing(front: str, rank: int) -> None:
    beside = Beside(Stack(), front)
    beside.train()
    beside.zero_grad()
    loss = square_loss(beside.ours, batch(rank))
    with FSDP.summon_full_params(beside.ours):
        assert all(isinstance(param, nn.Parameter) for param in beside.ours.parameters())
    loss.backward()
