"""What is set on a nested wrapper, meshes without a strategy, and torch's ``fully_shard`` beside wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.core import units_of
from fsdp_flat.errors import PhaseError
from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, by_hand, by_policy, placed
from tests.support.kit import mesh
from tests.support.models import Block, Stack

WHEN = pytest.mark.parametrize("steps_before", [0, 2], ids=["before the first step", "after two steps"])
WRAPS = pytest.mark.parametrize("wrap", [by_policy, by_hand])


class Tower(nn.Module):
    """Units inside units: two stacks of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.stacks = nn.ModuleList([Inner() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for stack in self.stacks:
            x = stack(x)
        return self.head(x)


class Inner(nn.Module):
    """A unit with two units and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(torch.tanh(self.layer(x)))


def tower(front: str, **options: Any) -> Beside:
    return Beside(Tower(), front, units=(Inner, Block), **options)


def check_scaled(beside: Beside, scales: dict[str, float], step: int) -> None:
    """Gradients are the mean over ranks times the scale of the longest start of the name."""
    beside.backward(step=step)
    for name, param in beside.plain.named_parameters():
        start = max((start for start in scales if name.startswith(start)), key=len, default=None)
        if start is not None:
            param.grad *= scales[start]
    beside.check_gradients(f"gradients scaled by {scales}")
    beside.zero_grad()


@WRAPPER_FRONTS
@WHEN
@pytest.mark.parametrize("where", ["stacks.0.blocks.1", "stacks.1", ""], ids=["leaf", "inner", "root"])
@pytest.mark.parametrize("layout", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_a_divide_factor_scales_what_is_at_and_below_its_wrapper(
    layout: str, where: str, steps_before: int, front: str, num_ranks: int
) -> None:
    beside = tower(front, **placed(layout))
    beside.train(num_steps=steps_before)
    wrapper: Any = beside.ours
    for name in where.split(".") if where else []:
        wrapper = wrapper[int(name)] if name.isdigit() else getattr(wrapper, name)
    assert isinstance(wrapper, FSDP)
    for factor in (5.0, torch.tensor(0.5)):
        wrapper.set_gradient_divide_factor(factor)
        check_scaled(beside, {where: num_ranks / float(factor)}, 7)
    wrapper.set_gradient_divide_factor(None)
    check_scaled(beside, {}, 8)


@WRAPPER_FRONTS
@WHEN
@on_ranks(2)
def test_divide_factors_of_the_root_and_then_of_a_nested_unit_both_hold(
    steps_before: int, front: str, num_ranks: int
) -> None:
    beside = tower(front)
    beside.train(num_steps=steps_before)
    beside.ours.set_gradient_divide_factor(8.0)
    beside.ours.stacks[0].set_gradient_divide_factor(3.0)
    for step in range(2):
        check_scaled(beside, {"": num_ranks / 8, "stacks.0": num_ranks / 3}, step)


@WRAPPER_FRONTS
@WRAPS
@WHEN
@on_ranks(2)
def test_a_communication_hook_on_a_nested_unit_is_refused_before_and_after_the_first_step(
    steps_before: int, wrap: Callable[..., FSDP], front: str
) -> None:
    beside = Beside(Stack(), front, shard=wrap)
    beside.train(num_steps=steps_before)
    with pytest.raises(PhaseError, match=r"nested") as caught:
        beside.ours.blocks[1].register_comm_hook(None, lambda _state, _grad, out=None: None)
    assert isinstance(caught.value, AssertionError)
    beside.train(num_steps=2)


# -- a mesh without a strategy -----------------------------------------------------------------------------------------


@WRAPPER_FRONTS
@WRAPS
@pytest.mark.parametrize("strategy", [{}, {"sharding_strategy": None}], ids=["left out", "None"])
@on_ranks(2, 4)
def test_a_mesh_of_two_dimensions_without_a_strategy_is_hybrid_sharding(
    strategy: dict[str, Any], wrap: Callable[..., FSDP], front: str, num_ranks: int
) -> None:
    for num_replicas in range(1, num_ranks + 1):
        if num_ranks % num_replicas:
            continue
        num_shards = num_ranks // num_replicas
        beside = Beside(Stack(), front, shard=wrap, device_mesh=mesh(num_replicas, num_shards), **strategy)
        assert beside.ours.sharding_strategy is ShardingStrategy.HYBRID_SHARD
        assert dist.get_world_size(beside.ours.process_group) == num_shards
        beside.train(num_steps=2)
        total = sum(param.numel() for param in beside.plain.parameters())
        held = torch.tensor(sum(param.numel() for param in beside.ours.parameters()))
        dist.all_reduce(held)
        padding = int(held) / num_replicas - total
        assert padding == 0 if front == "originals" else 0 <= padding < num_shards * len(units_of(beside.ours))


# -- torch's fully_shard -----------------------------------------------------------------------------------------------
