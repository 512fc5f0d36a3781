"""Pain 24: units and parameters that a step does not use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_flat import ShardingStrategy
from tests.support import on_ranks
from tests.support.beside import FRONTS, MEMORY, WIDTH, WRAPPER_FRONTS, Beside, placed
from tests.support.kit import square_loss
from tests.support.models import Block, Stack
from tests.support.steps import SHARDED, STRATEGIES, exchange_nbytes, mesh_for, recorded


class PartlyUsed(Block):
    """A block with a layer that no step uses, and one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        x = super().forward(x)
        return x + self.sometimes(x) if use else x


class PartlyUsedStack(Stack):
    """Uses a layer on some ranks."""

    def __init__(self, ranks_that_use: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.blocks[1] = PartlyUsed()
        self.ranks_that_use = ranks_that_use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        x = self.blocks[1](x, dist.get_rank() in self.ranks_that_use)
        return self.head(self.blocks[2](x))


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_no_rank_uses_gets_no_gradient_and_no_decay(strategy: ShardingStrategy) -> None:
    beside = Beside(
        PartlyUsedStack(), "originals", sharding_strategy=strategy, optimizer=decaying, **mesh_for(strategy)
    )
    unused = beside.ours.blocks[1].unused.weight
    before = unused.detach().clone()
    for _ in range(3):
        beside.backward()
        assert unused.grad is None
        beside.check_gradients()
        beside.step()
    beside.check_parameters()
    assert torch.equal(unused, before)


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("users", [(0,), (1,)])
def test_a_parameter_that_some_ranks_use_gets_the_mean_with_zeros(
    users: tuple[int, ...], strategy: ShardingStrategy
) -> None:
    beside = Beside(
        PartlyUsedStack(users), "originals", sharding_strategy=strategy, optimizer=decaying, **mesh_for(strategy)
    )
    beside.train(num_steps=3)


@on_ranks(2)
def test_use_that_changes_from_step_to_step_equals_the_reference() -> None:
    beside = Beside(PartlyUsedStack(), "originals")
    for users in ((), (0, 1), (1,), (), (0,)):
        beside.ours.module.ranks_that_use = users
        beside.plain.ranks_that_use = users
        beside.train()


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
@WRAPPER_FRONTS
def test_units_that_a_step_skips_get_no_gradient_and_no_decay(front: str, strategy: ShardingStrategy) -> None:
    beside = Beside(Stack(), front, sharding_strategy=strategy, optimizer=decaying)
    for order in ([0, 1, 2], [0, 2], [2], [0, 1, 2], []):
        beside.ours.module.order = order
        beside.plain.order = order
        beside.train()
    assert all(param.grad is None for param in beside.ours.blocks.parameters())


@on_ranks(2)
def test_a_loss_that_uses_part_of_the_outputs_equals_the_reference() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Block()
            self.left = Block()
            self.right = Block()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.body(x)
            return self.left(x), self.right(x)

    beside = Beside(TwoHeads(), "originals")

    def only(index: int) -> Any:
        return lambda model, x: model(x)[index].pow(2).mean()

    for index in (0, 1, 0):
        beside.train(only(index))


class Recomputing(nn.Module):
    """Recomputes a block and an operation after it; runs blocks of which only rank 0 uses the output."""

    def __init__(self, *, reentrant: bool, again: bool) -> None:
        super().__init__()
        self.first, self.block, self.sometimes = Block(), Block(), nn.Sequential(Block(), Block())
        self.reentrant, self.again = reentrant, again

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        recomputed = checkpoint(self.compute, x, use_reentrant=self.reentrant)
        other = (self.block if self.again else self.sometimes)(x if self.again else recomputed)
        if dist.get_rank() == 0:
            return recomputed + other
        return other if self.again else recomputed


@on_ranks(2)
@FRONTS
@MEMORY
@pytest.mark.parametrize("reentrant", [False, True])
def test_units_that_a_rank_leaves_out_after_a_recomputed_one(reentrant: bool, front: str, shared_memory: bool) -> None:
    model = Recomputing(reentrant=reentrant, again=False)
    Beside(model, front, **placed("FULL_SHARD", front, shared_memory=shared_memory)).train(num_steps=2)


@on_ranks(2)
@FRONTS
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_unit_that_all_ranks_use_and_only_some_recompute(reentrant: bool, front: str) -> None:
    Beside(Recomputing(reentrant=reentrant, again=True), front).train(num_steps=2)


@on_ranks(2)
def test_the_flags_of_use_are_one_small_all_reduce_a_backward() -> None:
    beside = Beside(PartlyUsedStack((0,)), "originals")
    beside.train()
    with recorded() as record:
        square_loss(beside.ours, beside.batch()).backward()
    flags = [call for call in record.calls if call.name == "all_reduce"]
    assert [call.nbytes for call in flags] == [exchange_nbytes(beside.ours)]
