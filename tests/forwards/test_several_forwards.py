"""Pains 21 and 25: forwards and backwards in any order, and first calls that are no training step of the root."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support import assert_close, on_ranks
from tests.support.kit import Block, Stack, square_loss
from tests.support.steps import SHARDED, STRATEGIES, WIDTH, Twin, assert_idle, batch, batches, mesh_for

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def two_inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(rank, 0), batch(rank, 1)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["f f b b", "f f b b reversed", "f f (b+b)", "f b f b"])
def test_several_forwards_before_their_backwards_equal_the_reference(
    how: str, strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))

    def run(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        if how == "f b f b":
            for x in pair:
                square_loss(model, x).backward()
            return
        losses = [square_loss(model, x) for x in pair]
        if how == "f f (b+b)":
            sum(losses).backward()
        else:
            for loss in reversed(losses) if "reversed" in how else losses:
                loss.backward()

    for _ in range(2):
        twin.optimizer.zero_grad()
        twin.plain_optimizer.zero_grad()
        run(twin.model, two_inputs(rank))
        for other in range(dist.get_world_size()):
            run(twin.plain, two_inputs(other))
        for param in twin.plain.parameters():
            param.grad /= dist.get_world_size()
        twin.check_gradients(**CLOSE)
        twin.optimizer.step()
        twin.plain_optimizer.step()
        twin.check_parameters(**CLOSE)
        assert_idle(twin.model)


class Twice(nn.Module):
    """One unit used twice in a forward, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.between = Block()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.shared(self.between(self.shared(x))))


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_unit_used_twice_in_a_forward_equals_the_reference(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    twin = Twin.of(Twice(), sharding_strategy=strategy, use_orig_params=use_orig_params)
    for _ in range(3):
        twin.step()


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
    policy = ModuleWrapPolicy({Stack, Block})
    twin = Twin.of(Contrastive(), sharding_strategy=strategy, auto_wrap_policy=policy)
    for _ in range(3):
        twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_two_roots_trained_in_turn_equal_the_reference(use_orig_params: bool, rank: int) -> None:
    """As in a GAN: one loss goes through both, each has its own optimizer."""
    first = Twin.of(Stack(), use_orig_params=use_orig_params)
    torch.manual_seed(3)
    second = Twin.of(nn.Sequential(nn.Linear(5, 8), Block(), nn.Linear(8, 1)), use_orig_params=use_orig_params)

    def loss_of(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return b(a(x)).pow(2).mean()

    for step in range(2):
        inputs = batches(step)
        for twin in (first, second):
            twin.optimizer.zero_grad()
            twin.plain_optimizer.zero_grad()
        loss_of(first.model, second.model, inputs[rank]).backward()
        for x in inputs:
            (loss_of(first.plain, second.plain, x) / len(inputs)).backward()
        for twin in (first, second):
            twin.check_gradients(**CLOSE)
            twin.optimizer.step()
            twin.plain_optimizer.step()
            twin.check_parameters(**CLOSE)
            assert_idle(twin.model)


@on_ranks(2)
def test_backward_twice_through_one_graph_adds_twice_the_gradient(rank: int) -> None:
    twin = Twin.of(Stack())
    inputs = batches()
    loss = square_loss(twin.model, inputs[rank])
    loss.backward(retain_graph=True)
    loss.backward()
    for x in inputs * 2:
        (square_loss(twin.plain, x) / len(inputs)).backward()
    twin.check_gradients(**CLOSE)
    assert_idle(twin.model)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters")
def test_a_backward_that_keeps_its_graph_reduces_what_no_sync_has_left_under_every_strategy(rank: int) -> None:
    strategies = [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP]
    stack = Stack()
    of_block = dict(zip(stack.blocks, strategies, strict=False))
    policy = CustomPolicy(lambda module: {"sharding_strategy": of_block[module]} if module in of_block else False)
    twin = Twin.of(stack, auto_wrap_policy=policy)
    first, second = batches(), [batch(each, 1) for each in range(2)]
    with twin.model.no_sync():
        square_loss(twin.model, first[rank]).backward()
    square_loss(twin.model, second[rank]).backward(retain_graph=True)
    for x in (*first, *second):
        (square_loss(twin.plain, x) / 2).backward()
    twin.check_gradients(**CLOSE)


# -- pain 25 -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_a_first_call_that_does_not_train_changes_nothing_about_training(
    mode: str, strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
    for _ in range(2):
        if mode == "eval":
            twin.model.eval()
            out = twin.model(batch(rank))
            twin.model.train()
        else:
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                out = twin.model(batch(rank))
        with torch.no_grad():
            assert_close(out.detach().clone(), twin.plain(batch(rank)), **CLOSE)
        if mode != "eval":
            assert_idle(twin.model)
        twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("trains", [False, True])
def test_a_unit_called_alone_before_its_root_changes_nothing_about_training(
    trains: bool, strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params)
    with torch.set_grad_enabled(trains):
        out = twin.model.blocks[1](batch(rank))
    assert_close(out.detach(), twin.plain.blocks[1](batch(rank)).detach(), **CLOSE)
    if trains:
        out.pow(2).mean().backward()
        for x in batches():
            (twin.plain.blocks[1](x).pow(2).mean() / dist.get_world_size()).backward()
        twin.check_gradients(**CLOSE)
    for _ in range(2):
        twin.step()


@on_ranks(2)
def test_units_alone_and_the_root_in_any_order_equal_the_reference(rank: int) -> None:
    twin = Twin.of(Stack())

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        alone = model.blocks[2](x).pow(2).mean()
        whole_model = model(x).pow(2).mean()
        again = model.blocks[0](model.blocks[1](x)).pow(2).mean()
        return alone + whole_model + again

    for _ in range(3):
        twin.step(loss_of)
    assert twin.model._is_root


@on_ranks(2)
def test_a_unit_whose_graph_was_made_before_the_root_took_it_over_still_trains(rank: int) -> None:
    twin = Twin.of(Stack())

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.blocks[1](x).pow(2).mean() + model(x).pow(2).mean()

    twin.step(loss_of)
    twin.step()


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_forward_whose_outputs_are_dropped_leaves_the_next_step_right(strategy: ShardingStrategy, rank: int) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy)
    twin.step()
    twin.model(batch(rank))
    twin.step()
    twin.model(batch(rank))
    with FSDP.summon_full_params(twin.model, writeback=False):
        assert twin.model.head.weight.shape == (5, WIDTH)
    twin.step()


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_weights_changed_between_a_kept_forward_and_the_next_one_are_seen(
    strategy: ShardingStrategy, rank: int
) -> None:
    """After forward the root (and with SHARD_GRAD_OP every unit) stays gathered; an optimizer may step then."""
    twin = Twin.of(Stack(), sharding_strategy=strategy)
    twin.step()
    before = twin.model(batch(rank)).detach().clone()
    with torch.no_grad():
        for model in (twin.model, twin.plain):
            for param in model.parameters():
                param.mul_(0.5)
    after = twin.model(batch(rank)).detach()
    assert not torch.allclose(before, after)
    assert_close(after, twin.plain(batch(rank)).detach(), **CLOSE)
