"""Weights that change between a forward and its backward: an assignment raises, an optimizer's step is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_flat import ShardingStrategy
from fsdp_flat.errors import PhaseError
from tests.support import assert_close, on_ranks
from tests.support.beside import CLOSE, MEMORY, WIDTH, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.kit import square_loss, wrapped
from tests.support.models import Stack


def assign_parameter(module: nn.Module, value: torch.Tensor) -> None:
    module.weight = nn.Parameter(value)


def assign_data(module: nn.Module, value: torch.Tensor) -> None:
    module.weight.data = value


HOWS = pytest.mark.parametrize("assign", [assign_parameter, assign_data])
# The strategy; where the parameter is; the unit that owns it. These are still whole after a forward.
CASES = [
    ("SHARD_GRAD_OP", "blocks.0.up", "blocks.0"),
    ("SHARD_GRAD_OP", "blocks.2.down", "blocks.2"),
    ("SHARD_GRAD_OP", "head", "Stack"),
    ("NO_SHARD", "blocks.0.up", "blocks.0"),
    ("NO_SHARD", "blocks.2.down", "blocks.2"),
    ("NO_SHARD", "first", "Stack"),
    ("FULL_SHARD", "first", "Stack"),
    ("FULL_SHARD", "head", "Stack"),
    ("HYBRID_SHARD 2x1", "blocks.1.up", "blocks.1"),
    ("_HYBRID_SHARD_ZERO2 1x2", "blocks.1.up", "blocks.1"),
]


def assign_twice(beside: Beside, path: str, assign: Callable[[nn.Module, torch.Tensor], None]) -> None:
    """The same new value in both models."""
    layer = beside.plain.get_submodule(path)
    value = layer.weight.detach() * 0.5 + 0.1
    assign(layer, value.clone())
    target = beside.ours.module
    for name in path.split("."):
        target = getattr(target, name)
    assign(target, value.clone())


@pytest.mark.of_guards
@HOWS
@pytest.mark.parametrize("layout, path, unit", CASES)
@on_ranks(2)
def test_a_backward_after_a_weight_was_assigned_raises_with_the_unit_and_the_parameter(
    layout: str,
    path: str,
    unit: str,
    assign: Callable[[nn.Module, torch.Tensor], None],
    rank: int,
) -> None:
    beside = Beside(Stack(), "originals", **placed(layout))
    loss = square_loss(beside.ours, batch(rank, 7))
    assign_twice(beside, path, assign)
    with pytest.raises(PhaseError) as caught:
        loss.backward()
    text = str(caught.value)
    assert f"'{unit}'" in text, text
    assert f"{path.removeprefix(unit + '.')}.weight'" in text, text


@pytest.mark.of_guards
@HOWS
@pytest.mark.parametrize("layout, path, unit", CASES)
@on_ranks(2)
def test_a_weight_assigned_after_a_forward_without_a_backward_raises_at_the_next_forward(
    layout: str, path: str, unit: str, assign: Callable[[nn.Module, torch.Tensor], None], rank: int
) -> None:
    beside = Beside(Stack(), "originals", **placed(layout))
    beside.train()
    square_loss(beside.ours, batch(rank, 7))
    assign_twice(beside, path, assign)
    with torch.no_grad(), pytest.raises(PhaseError, match=f"unit '{unit}' was assigned after a forward"):
        beside.ours(batch(rank, 8))


class HalfUsed(nn.Module):
    """A unit in which the elements of the last rank are those of a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@MEMORY
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_a_step_after_a_forward_without_backward_is_seen_where_this_rank_has_no_gradients(
    layout: str, shared_memory: bool
) -> None:
    options = placed(layout, shared_memory=shared_memory)
    beside = Beside(HalfUsed(), "originals", units=(), **options)
    optimizers = list(beside.optimizers.values())
    x = batch(0)
    for step in range(3):
        beside.backward(step=step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        beside.ours(x)
        for optimizer in optimizers:
            optimizer.step()
        assert_close(beside.ours(x).detach(), beside.plain(x).detach(), **CLOSE)
        beside.zero_grad()
    beside.check_parameters()


@on_ranks(2)
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 1x2"])
@WRAPPER_FRONTS
def test_data_that_a_caller_takes_out_and_puts_back_is_unchanged(layout: str, front: str) -> None:
    beside = Beside(Stack(), front, **placed(layout))
    beside.train()
    x = batch(0, 5)
    params = list(beside.ours.parameters())
    averages = [torch.zeros_like(param.data) for param in params]
    with torch.no_grad():
        for param, average in zip(params, averages, strict=True):
            param.data, average.data = average.data, param.data
        assert not beside.ours(x).any()
        for param, average in zip(params, averages, strict=True):
            param.data, average.data = average.data, param.data
        assert_close(beside.ours(x), beside.plain(x), **CLOSE)
    beside.train()
    beside.check_parameters()


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.every_value_in_quick("only NO_SHARD has outputs made of the shard's memory")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_data_assigned_to_sharded_parameters_while_a_forward_keeps_their_unit_unsharded_is_used_by_the_next(
    strategy: str, front: str
) -> None:
    """torch's FSDP1 uses it under NO_SHARD, and ignores it without a word where parameters are sharded."""
    model = wrapped(
        nn.Linear(4, 4, bias=False),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=front == "originals",
    )
    (param,) = model.parameters()
    for value in (1.0, 2.0):
        param.data = torch.full_like(param, value)
        assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 4 * value))
