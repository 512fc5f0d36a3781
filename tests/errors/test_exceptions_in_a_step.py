"""Pain 40: an exception in the middle of a step, on all ranks, and what the next step is like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError
from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, assert_idle, batch
from tests.support.kit import RaisesInBackward, Trouble, square_loss
from tests.support.models import Block, Stack
from tests.support.steps import STRATEGIES, mesh_for


class Fragile(Block):
    """Raises where it is told to."""

    trouble = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trouble == "before":
            raise Trouble("before")
        if self.trouble == "backward":
            x = RaisesInBackward.apply(x)
        x = super().forward(x)
        if self.trouble == "after":
            raise Trouble("after")
        if self.trouble == "backward at the end":
            x = RaisesInBackward.apply(x)
        return x


WHERE = ["before", "after", "backward", "backward at the end"]


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", WHERE)
def test_the_step_after_an_exception_in_any_unit_equals_the_reference(
    where: str, strategy: ShardingStrategy, rank: int
) -> None:
    beside = Beside(
        Stack(block=Fragile),
        "flat" if strategy is ShardingStrategy.SHARD_GRAD_OP else "originals",
        units=(Fragile,),
        sharding_strategy=strategy,
        **mesh_for(strategy),
    )
    for index in (0, 1, 2, 2):
        block = beside.ours.blocks[index].module
        block.trouble = where
        beside.zero_grad()
        with pytest.raises(Trouble):
            square_loss(beside.ours, batch(rank)).backward()
        block.trouble = ""
        if "backward" not in where:
            assert_idle(beside.ours)
        if index > 0:
            beside.zero_grad()
            beside.train()


@on_ranks(2)
def test_an_exception_that_an_outer_forward_catches_leaves_the_step_right() -> None:
    class Catching(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                try:
                    x = block(x)
                except Trouble:
                    x = x * 2
            return self.head(x)

    beside = Beside(Catching(block=Fragile), units=(Fragile,))
    for index in (None, 1, 0, 2, None):
        for model in beside.models:
            for number, block in enumerate(model.blocks):
                getattr(block, "module", block).trouble = "after" if number == index else ""
        beside.train()


@on_ranks(2)
@pytest.mark.parametrize("where", ["backward", "backward at the end"])
def test_the_step_after_an_exception_in_backward_has_its_own_gradients_and_states_can_be_saved(
    where: str, rank: int
) -> None:
    beside = Beside(Stack(block=Fragile), units=(Fragile,))
    beside.train()
    beside.ours.blocks[1].module.trouble = where
    with pytest.raises(Trouble):
        square_loss(beside.ours, batch(rank)).backward()
    beside.ours.blocks[1].module.trouble = ""
    state = beside.ours.state_dict()
    assert state["head.weight"].shape == (5, WIDTH)
    with FSDP.summon_full_params(beside.ours, writeback=False):
        pass
    beside.check_parameters()
    beside.train()


@on_ranks(2)
def test_an_exception_under_no_sync_drops_what_was_accumulated_in_that_backward_only(rank: int) -> None:
    beside = Beside(Stack(block=Fragile), units=(Fragile,))
    beside.train()
    beside.ours.blocks[2].module.trouble = "backward"
    with beside.ours.no_sync(), pytest.raises(Trouble):
        square_loss(beside.ours, batch(rank)).backward()
    beside.ours.blocks[2].module.trouble = ""
    beside.zero_grad()
    beside.train()


@on_ranks(2)
def test_an_exception_in_the_roots_own_layers_leaves_the_next_step_right(rank: int) -> None:
    beside = Beside(Stack())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        beside.ours(torch.zeros(2, WIDTH + 1, dtype=torch.float64))
    assert_idle(beside.ours)
    beside.train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        beside.ours(torch.zeros(2, WIDTH + 1, dtype=torch.float64))
    assert all(unit.is_sharded for unit in units_of(beside.ours))
    beside.train()


@on_ranks(2)
@WRAPPER_FRONTS
def test_a_conversion_after_a_backward_that_raised_converts(front: str, rank: int) -> None:
    beside = Beside(Stack(), front, dtype=torch.float32)
    out = beside.ours(beside.batch())

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    loss = out.sum()
    out.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        loss.backward()
    beside.ours.double()
    assert all(param.dtype is torch.float64 for param in beside.ours.parameters())


class NeverFinished:
    """Stands for a reduction in flight whose other ranks have failed."""

    def finish(self) -> None:
        raise AssertionError("waited for a reduction of another model")


@on_ranks(2)
def test_clearing_gradients_of_one_model_waits_for_no_reduction_of_another(rank: int) -> None:
    failed, other = Beside(Stack(2), "originals"), Beside(Stack(2), "originals")
    failed.train()
    in_flight: list[Any] = units_of(failed.ours)[0].step.reductions._in_flight
    in_flight.append(NeverFinished())
    other.train()
    other.optimizer.zero_grad()
    in_flight.clear()


@on_ranks(2)
def test_a_tree_of_units_that_do_not_fit_is_refused_at_each_use(rank: int) -> None:
    model = FSDP(nn.Sequential(FSDP(Block(), use_orig_params=True), Block()), use_orig_params=False)
    for _ in range(2):
        with pytest.raises(OptionError, match="must have the same use_orig_params"):
            model(batch(rank).float())
