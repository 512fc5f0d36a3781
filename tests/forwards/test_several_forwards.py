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
from tests.support.kit import square_loss
from tests.support.models import Block, Stack
from tests.support.steps import SHARDED, STRATEGIES, mesh_for


class Contrastive(nn.Module):
    """A shared encoder called on two inputs, and a head on both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) - self.encoder(x.flip(0))


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_shared_encoder_called_twice_equals_the_reference(strategy: ShardingStrategy) -> None:
    beside = Beside(Contrastive(), sharding_strategy=strategy, units=(Stack, Block))
    beside.train(num_steps=3)


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
@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_a_first_call_that_does_not_train_changes_nothing_about_training(
    mode: str, strategy: ShardingStrategy, front: str, rank: int
) -> None:
    beside = Beside(Stack(), front, sharding_strategy=strategy, **mesh_for(strategy))
    for _ in range(2):
        if mode == "eval":
            beside.ours.eval()
            out = beside.ours(batch(rank))
            beside.ours.train()
        else:
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                out = beside.ours(batch(rank))
        with torch.no_grad():
            assert_close(out.detach().clone(), beside.plain(batch(rank)), **CLOSE)
        if mode != "eval":
            assert_idle(beside.ours)
        beside.train()


@on_ranks(2)
def test_units_alone_and_the_root_in_any_order_equal_the_reference(rank: int) -> None:
    beside = Beside(Stack())

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        alone = model.blocks[2](x).pow(2).mean()
        whole_model = model(x).pow(2).mean()
        again = model.blocks[0](model.blocks[1](x)).pow(2).mean()
        return alone + whole_model + again

    beside.train(loss_of, num_steps=3)
    assert beside.ours._is_root


@on_ranks(2)
def test_a_unit_whose_graph_was_made_before_the_root_took_it_over_still_trains(rank: int) -> None:
    beside = Beside(Stack())

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.blocks[1](x).pow(2).mean() + model(x).pow(2).mean()

    beside.train(loss_of)
    beside.train()


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
