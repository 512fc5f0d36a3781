"""Pain 24: units and parameters that a step does not use."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import ShardingStrategy
from tests.support import on_ranks
from tests.support.kit import Block, Stack, square_loss
from tests.support.steps import SHARDED, STRATEGIES, WIDTH, Twin, batches, exchange_nbytes, mesh_for, recorded


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
    """``ranks_that_use`` is looked at with the mark that the batch carries in its first element."""

    def __init__(self, ranks_that_use: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.blocks[1] = PartlyUsed()
        self.ranks_that_use = ranks_that_use

    def forward(self, marked: tuple[torch.Tensor, int]) -> torch.Tensor:
        x, rank = marked
        x = self.blocks[0](self.first(x))
        x = self.blocks[1](x, rank in self.ranks_that_use)
        return self.head(self.blocks[2](x))


def marked_step(twin: Twin) -> None:
    """One step in which every batch carries its rank."""
    inputs = list(zip(batches(twin.num_steps), range(dist.get_world_size()), strict=True))
    twin.num_steps += 1
    twin.optimizer.zero_grad()
    square_loss(twin.model, inputs[dist.get_rank()]).backward()
    twin.finish_step(inputs, square_loss, rtol=1e-5, atol=1e-6)


decaying = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_no_rank_uses_gets_no_gradient_and_no_decay(strategy: ShardingStrategy) -> None:
    twin = Twin.of(
        PartlyUsedStack(), sharding_strategy=strategy, use_orig_params=True, optimizer=decaying, **mesh_for(strategy)
    )
    unused = twin.model.blocks[1].unused.weight
    before = unused.detach().clone()
    for _ in range(3):
        marked_step(twin)
        assert unused.grad is None
    assert torch.equal(unused, before)


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("users", [(0,), (1,)])
def test_a_parameter_that_some_ranks_use_gets_the_mean_with_zeros(
    users: tuple[int, ...], strategy: ShardingStrategy
) -> None:
    twin = Twin.of(
        PartlyUsedStack(users),
        sharding_strategy=strategy,
        use_orig_params=True,
        optimizer=decaying,
        **mesh_for(strategy),
    )
    for _ in range(3):
        marked_step(twin)


@on_ranks(2)
def test_use_that_changes_from_step_to_step_equals_the_reference() -> None:
    twin = Twin.of(PartlyUsedStack(), use_orig_params=True)
    for users in ((), (0, 1), (1,), (), (0,)):
        twin.model.module.ranks_that_use = users
        twin.plain.ranks_that_use = users
        marked_step(twin)


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_units_that_a_step_skips_get_no_gradient_and_no_decay(
    use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params, optimizer=decaying)
    for order in ([0, 1, 2], [0, 2], [2], [0, 1, 2], []):
        twin.model.module.order = order
        twin.plain.order = order
        twin.step()
    assert all(param.grad is None for param in twin.model.blocks.parameters())


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

    twin = Twin.of(TwoHeads(), use_orig_params=True)

    def only(index: int) -> Any:
        return lambda model, x: model(x)[index].pow(2).mean()

    for index in (0, 1, 0):
        twin.step(only(index))


@on_ranks(2)
def test_the_flags_of_use_are_one_small_all_reduce_a_backward() -> None:
    twin = Twin.of(PartlyUsedStack((0,)), use_orig_params=True)
    marked_step(twin)
    inputs = list(zip(batches(0), range(2), strict=True))
    with recorded() as record:
        square_loss(twin.model, inputs[dist.get_rank()]).backward()
    flags = [call for call in record.calls if call.name == "all_reduce"]
    assert [call.nbytes for call in flags] == [exchange_nbytes(twin.model)]
