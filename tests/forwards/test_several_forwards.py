"""Pains 21 and 25: forwards and backwards in any order, and first calls that are no training step of the root."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.wrap import CustomPolicy
from tests.support import assert_close, on_ranks
from tests.support.beside import CLOSE, WIDTH, WRAPPER_FRONTS, Beside, assert_idle, average_gradients, batch
from tests.support.kit import no_shard_allowed, square_loss
from tests.support.models import Block, Stack
from tests.support.steps import SHARDED


@on_ranks(2)
@WRAPPER_FRONTS
def test_two_roots_trained_in_turn_equal_the_reference(front: str, rank: int) -> None:
    """As in a GAN: one loss goes through both, each has its own optimizer."""
    first = Beside(Stack(), front)
    torch.manual_seed(3)
    second = Beside(nn.Sequential(nn.Linear(5, 8), Block(), nn.Linear(8, 1)), front)

    def loss_of(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return b(a(x)).pow(2).mean()

    for step in range(2):
        for models in ((first.ours, second.ours), (first.plain, second.plain)):
            loss_of(*models, batch(rank, step)).backward()
        for beside in (first, second):
            average_gradients(beside.plain)
            beside.check_gradients()
            beside.step()
            beside.check_parameters()
            assert_idle(beside.ours)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters")
def test_a_backward_that_keeps_its_graph_reduces_what_no_sync_has_left_under_every_strategy(rank: int) -> None:
    strategies = [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP]
    stack = Stack()
    of_block = dict(zip(stack.blocks, strategies, strict=False))
    policy = CustomPolicy(lambda module: {"sharding_strategy": of_block[module]} if module in of_block else False)
    beside = Beside(stack, auto_wrap_policy=policy)
    with beside.no_sync():
        beside.backward()
    square_loss(beside.ours, batch(rank, 1)).backward(retain_graph=True)
    beside.follow(step=1)
    beside.check_gradients()


# -- pain 25 -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_forward_whose_outputs_are_dropped_leaves_the_next_step_right(strategy: ShardingStrategy, rank: int) -> None:
    beside = Beside(Stack(), sharding_strategy=strategy)
    beside.train()
    beside.ours(batch(rank))
    beside.train()
    beside.ours(batch(rank))
    with FSDP.summon_full_params(beside.ours, writeback=False):
        assert beside.ours.head.weight.shape == (5, WIDTH)
    beside.train()


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", SHARDED)
def test_weights_changed_between_a_kept_forward_and_the_next_one_are_seen(
    strategy: ShardingStrategy, front: str, rank: int
) -> None:
    """After forward the root (and with SHARD_GRAD_OP every unit) stays gathered; an optimizer may step then."""
    beside = Beside(Stack(), front, sharding_strategy=strategy)
    beside.train()
    before = beside.ours(batch(rank)).detach().clone()
    with torch.no_grad():
        for model in beside.models:
            for param in model.parameters():
                param.mul_(0.5)
    after = beside.ours(batch(rank)).detach()
    assert not torch.allclose(before, after)
    assert_close(after, beside.plain(batch(rank)).detach(), **CLOSE)


@on_ranks(2)
def test_one_rank_alone_evaluates_a_replicated_unit_while_a_forward_waits_for_its_backward(rank: int) -> None:
    """The unit sends nothing, so the rank stays in step with the others: its root is unsharded as theirs are."""
    with no_shard_allowed():
        replicated = FSDP(nn.Linear(8, 8).double(), sharding_strategy=ShardingStrategy.NO_SHARD)
        model = FSDP(nn.Sequential(nn.Linear(8, 8).double(), replicated))
    loss = square_loss(model, batch(rank, width=8))
    if rank == 0:
        with torch.no_grad():
            replicated(batch(rank, 1, width=8))
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    assert_idle(model)
