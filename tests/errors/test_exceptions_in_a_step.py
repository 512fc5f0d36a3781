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
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import Block, RaisesInBackward, Stack, Trouble, square_loss
from tests.support.steps import STRATEGIES, WIDTH, Twin, assert_idle, batch, mesh_for


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
    twin = Twin.of(
        Stack(block=Fragile),
        auto_wrap_policy=ModuleWrapPolicy({Fragile}),
        sharding_strategy=strategy,
        use_orig_params=strategy is not ShardingStrategy.SHARD_GRAD_OP,
        **mesh_for(strategy),
    )
    for index in (0, 1, 2, 2):
        block = twin.model.blocks[index].module
        block.trouble = where
        twin.optimizer.zero_grad()
        with pytest.raises(Trouble):
            square_loss(twin.model, batch(rank)).backward()
        block.trouble = ""
        if "backward" not in where:
            assert_idle(twin.model)
        if index > 0:
            twin.optimizer.zero_grad()
            twin.step()


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

    twin = Twin.of(Catching(block=Fragile), auto_wrap_policy=ModuleWrapPolicy({Fragile}))
    for index in (None, 1, 0, 2, None):
        for model in (twin.model, twin.plain):
            for number, block in enumerate(model.blocks):
                getattr(block, "module", block).trouble = "after" if number == index else ""
        twin.step()


@on_ranks(2)
@pytest.mark.parametrize("where", ["backward", "backward at the end"])
def test_after_an_exception_in_backward_whole_parameters_can_be_summoned_and_saved(where: str, rank: int) -> None:
    twin = Twin.of(Stack(block=Fragile), auto_wrap_policy=ModuleWrapPolicy({Fragile}))
    twin.step()
    twin.model.blocks[1].module.trouble = where
    with pytest.raises(Trouble):
        square_loss(twin.model, batch(rank)).backward()
    twin.model.blocks[1].module.trouble = ""
    state = twin.model.state_dict()
    assert state["head.weight"].shape == (5, WIDTH)
    with FSDP.summon_full_params(twin.model, writeback=False):
        pass
    twin.check_parameters()
    twin.step()


@on_ranks(2)
def test_an_exception_under_no_sync_drops_what_was_accumulated_in_that_backward_only(rank: int) -> None:
    twin = Twin.of(Stack(block=Fragile), auto_wrap_policy=ModuleWrapPolicy({Fragile}))
    twin.step()
    twin.model.blocks[2].module.trouble = "backward"
    with twin.model.no_sync(), pytest.raises(Trouble):
        square_loss(twin.model, batch(rank)).backward()
    twin.model.blocks[2].module.trouble = ""
    twin.optimizer.zero_grad()
    twin.step()


@on_ranks(2)
def test_an_exception_in_the_roots_own_layers_leaves_the_next_step_right(rank: int) -> None:
    twin = Twin.of(Stack())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        twin.model(torch.zeros(2, WIDTH + 1))
    assert_idle(twin.model)
    twin.step()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        twin.model(torch.zeros(2, WIDTH + 1))
    assert all(unit.is_sharded for unit in units_of(twin.model))
    twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_conversion_after_a_backward_that_raised_converts(use_orig_params: bool, rank: int) -> None:
    twin = Twin.of(Stack(), use_orig_params=use_orig_params)
    out = twin.model(batch(rank))

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    loss = out.sum()
    out.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        loss.backward()
    twin.model.double()
    assert all(param.dtype is torch.float64 for param in twin.model.parameters())


class NeverFinished:
    """Stands for a reduction in flight whose other ranks have failed."""

    def finish(self) -> None:
        raise AssertionError("waited for a reduction of another model")


@on_ranks(2)
def test_clearing_gradients_of_one_model_waits_for_no_reduction_of_another(rank: int) -> None:
    failed, other = Twin.of(Stack(2), use_orig_params=True), Twin.of(Stack(2), use_orig_params=True)
    failed.step()
    in_flight: list[Any] = units_of(failed.model)[0].step._in_flight
    in_flight.append(NeverFinished())
    other.step()
    other.optimizer.zero_grad()
    in_flight.clear()


@on_ranks(2)
def test_a_tree_of_units_that_do_not_fit_is_refused_at_each_use(rank: int) -> None:
    model = FSDP(nn.Sequential(FSDP(Block(), use_orig_params=True), Block()), use_orig_params=False)
    for _ in range(2):
        with pytest.raises(OptionError, match="must have the same use_orig_params"):
            model(batch(rank))
