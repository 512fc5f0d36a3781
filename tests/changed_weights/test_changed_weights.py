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
from tests.support.kit import Stack, square_loss
from tests.support.steps import STRATEGIES, Twin, batch, mesh_for

KINDS = pytest.mark.parametrize("use_orig_params", [False, True])
SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP


def _load(twin: Twin) -> None:
    state = {name: value * 0.5 for name, value in twin.model.state_dict().items()}
    twin.model.load_state_dict(state)
    twin.plain.load_state_dict(state)


def _assign(twin: Twin) -> None:
    with torch.no_grad():
        for model in (twin.model, twin.plain):
            for param in model.parameters():
                param.mul_(0.5)


def _write_back(twin: Twin) -> None:
    with torch.no_grad(), FSDP.summon_full_params(twin.model):
        for mine, other in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
            mine.copy_(other.mul_(0.5))


# With SHARD_GRAD_OP the gathered weights of the forward are still there after an optimizer step: see below.
CASES = [
    (change, strategy)
    for change in (_load, _assign, _write_back)
    for strategy in STRATEGIES
    if (change, strategy) != (_assign, SHARD_GRAD_OP)
]


@KINDS
@on_ranks(2)
@pytest.mark.parametrize("change, strategy", CASES)
def test_a_backward_through_weights_that_changed_raises_and_the_next_step_is_right(
    change: Callable[[Twin], None], strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
    twin.step()
    twin.optimizer.zero_grad()
    loss = square_loss(twin.model, batch(rank))
    change(twin)
    with pytest.raises(PhaseError, match="were changed after the forward of this backward"):
        loss.backward()
    twin.optimizer.zero_grad()
    twin.step()


@KINDS
@on_ranks(2)
def test_a_backward_after_a_load_of_local_shards_raises(use_orig_params: bool, rank: int) -> None:
    twin = Twin.of(Stack(), use_orig_params=use_orig_params)
    with FSDP.state_dict_type(twin.model, StateDictType.LOCAL_STATE_DICT):
        state = twin.model.state_dict()
        loss = square_loss(twin.model, batch(rank))
        twin.model.load_state_dict(state)
    with pytest.raises(PhaseError, match="were changed after the forward of this backward"):
        loss.backward()


@KINDS
@on_ranks(2)
def test_weights_kept_gathered_give_the_gradient_of_their_forward(use_orig_params: bool, rank: int) -> None:
    gradients = []
    for change in (False, True):
        torch.manual_seed(0)
        twin = Twin.of(Stack(), sharding_strategy=SHARD_GRAD_OP, use_orig_params=use_orig_params)
        loss = square_loss(twin.model, batch(rank))
        if change:
            _assign(twin)
        loss.backward()
        gradients.append([param.grad.clone() for param in twin.model.parameters() if param.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@KINDS
@on_ranks(2)
def test_looking_at_whole_parameters_between_forward_and_backward_changes_nothing(
    use_orig_params: bool, rank: int
) -> None:
    twin = Twin.of(Stack(), use_orig_params=use_orig_params)
    twin.step()
    twin.optimizer.zero_grad()
    loss = square_loss(twin.model, batch(rank))
    with FSDP.summon_full_params(twin.model):
        assert all(isinstance(param, nn.Parameter) for param in twin.model.parameters())
    loss.backward()
