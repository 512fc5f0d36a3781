"""Units that every rank runs and whose outputs only some ranks use: the mean with zeros, and no disagreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import BackwardPrefetch
from tests.support import on_ranks
from tests.support.beside import MEMORY, ROWS, WIDTH, WRAPPER_FRONTS, Beside, batch, by_hand, by_policy, placed
from tests.support.kit import BLOCKS
from tests.support.models import Block

# For each block the ranks whose loss does not depend on it; -1 is the last rank.
Skips = dict[int, tuple[int, ...]]
NOBODY: Skips = {}
SKIPS: list[Skips] = [
    {0: (0,)},
    {1: (0,)},
    {2: (0,)},
    NOBODY,
    {0: (-1,)},
    {1: (-1,)},
    {2: (-1,)},
    {0: (0,), 2: (-1,)},
    {0: (0,), 1: (0,), 2: (0,)},
    {1: (-1,), 2: (-1,)},
    {0: (0,), 1: (-1,), 2: (0,)},
]
# A second set for a second forward: other ranks skip other blocks.
OTHERS = SKIPS[3:] + SKIPS[:3]


class Skipping(nn.Module):
    """Every block runs; where a rank skips one, the next block gets what the one before gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, skipped: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            y = block(x)
            x = x if index in skipped else y
        return self.head(x)


def skipped_by(rank: int, skips: Skips) -> tuple[int, ...]:
    num_ranks = dist.get_world_size()
    return tuple(block for block, ranks in skips.items() if rank in {r % num_ranks for r in ranks})


def loss_with(*forwards: Skips) -> Any:
    """One forward after the other, then one backward through their sum."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        skipped = [skipped_by(dist.get_rank(), skips) for skips in forwards]
        losses = [model(x + index, each).pow(2).mean() for index, each in enumerate(skipped)]
        return torch.stack(losses).sum()

    return loss_of


def train(beside: Beside) -> None:
    """Two steps with each set of skips, then one where everything is used."""
    for skips in SKIPS:
        beside.train(loss_with(skips), num_steps=2)


# The layout, and whether ranks share memory.
LAYOUTS = pytest.mark.parametrize(
    "layout, shared_memory",
    [
        ("FULL_SHARD", True),
        ("FULL_SHARD", False),
        ("SHARD_GRAD_OP", True),
        ("SHARD_GRAD_OP", False),
        ("NO_SHARD", True),
        ("HYBRID_SHARD 2x1", True),
        ("_HYBRID_SHARD_ZERO2 1x2", False),
    ],
)


@WRAPPER_FRONTS
@LAYOUTS
@on_ranks(2)
def test_a_unit_that_only_some_ranks_use_gets_the_mean_with_zeros(layout: str, front: str, shared_memory: bool) -> None:
    train(Beside(Skipping(), front, **placed(layout, shared_memory=shared_memory)))


@MEMORY
@pytest.mark.parametrize("layout", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD 2x2", "HYBRID_SHARD 4x1"])
@on_ranks(4)
def test_a_unit_that_only_some_of_four_ranks_use_gets_the_mean_with_zeros(layout: str, shared_memory: bool) -> None:
    train(Beside(Skipping(), "originals", **placed(layout, shared_memory=shared_memory)))


@MEMORY
@pytest.mark.parametrize("front, layout", [("flat", "FULL_SHARD"), ("originals", "SHARD_GRAD_OP")])
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_POST, None], ids=["after", "none"])
@on_ranks(2)
def test_the_same_holds_for_other_prefetches(
    prefetch: BackwardPrefetch | None, layout: str, front: str, shared_memory: bool
) -> None:
    options = placed(layout, shared_memory=shared_memory)
    train(Beside(Skipping(), front, backward_prefetch=prefetch, **options))


@WRAPPER_FRONTS
@pytest.mark.parametrize("wrap", [by_policy, by_hand])
@pytest.mark.parametrize("skips", [SKIPS[0], SKIPS[2], SKIPS[5], SKIPS[7]], ids=str)
@on_ranks(2)
def test_the_same_holds_in_the_very_first_step(skips: Skips, wrap: Any, front: str) -> None:
    Beside(Skipping(), front, shard=wrap).train(loss_with(skips), num_steps=2)


# Replicas must reduce the same units in the same order (docs/differences.md), which they do not here.
@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP"])
@MEMORY
@on_ranks(2)
def test_two_forwards_that_skip_different_units_before_one_backward_equal_the_replica(
    layout: str, front: str, shared_memory: bool
) -> None:
    beside = Beside(Skipping(), front, **placed(layout, shared_memory=shared_memory))
    for skips, others in zip(SKIPS, OTHERS, strict=True):
        beside.train(loss_with(skips, others))


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_unit_that_every_rank_runs_and_none_uses_keeps_no_gradient(front: str) -> None:
    beside = Beside(Skipping(), front)
    for block in (0, 1, 2, 1):
        beside.backward(loss_with({block: (0, -1)}))
        assert beside.plain.blocks[block].up.weight.grad is None
        beside.check_gradients(f"gradients where no rank uses block {block}")
        beside.step()


class SkippingItself(Block):
    """Returns its input on ranks that skip it, as stochastic depth does."""

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        return x if skips else y


class StochasticDepth(nn.Module):
    """Its first block gets an input that requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SkippingItself() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, skipped: tuple[int, ...]) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, index in skipped)
        return self.head(x)


@WRAPPER_FRONTS
@MEMORY
@on_ranks(2)
def test_a_loss_of_the_step_before_that_is_still_held_changes_nothing(front: str, shared_memory: bool) -> None:
    options = placed("FULL_SHARD", shared_memory=shared_memory)
    beside = Beside(StochasticDepth(), front, units=(SkippingItself,), **options)
    held: dict[nn.Module, list[torch.Tensor]] = {}

    def held_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        losses = held.setdefault(model, [])
        # Ranks take turns to use the first blocks.
        losses.append(model(x, (0, 1) if (dist.get_rank() + len(losses)) % 2 else ()).pow(2).mean())
        return losses[-1]

    beside.train(held_loss, num_steps=3)


class Wide(nn.Module):
    """A unit between layers of another, bigger unit; ``both`` says whether the inner one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = Block()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.before(x)
        y = self.inner(x)
        return self.after(y if both else x)


@MEMORY
@pytest.mark.parametrize(
    "front, layout", [("flat", "FULL_SHARD"), ("originals", "FULL_SHARD"), ("originals", "NO_SHARD")]
)
@pytest.mark.parametrize("skipping", [0, 1])
@on_ranks(2)
def test_a_unit_inside_another_that_one_rank_skips_equals_the_replica(
    skipping: int, layout: str, front: str, shared_memory: bool
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = Wide()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.head(self.wide(x, both))

    def wrap(module: nn.Module, apply: Any, **kwargs: Any) -> Any:
        module.wide = apply(module.wide, auto_wrap_policy=BLOCKS, **kwargs)
        return apply(module, **kwargs)

    options = placed(layout, shared_memory=shared_memory)
    beside = Beside(Outer(), front, shard=wrap, **options)
    beside.train(lambda model, x: model(x, dist.get_rank() != skipping).pow(2).mean(), num_steps=3)


class Detached(nn.Module):
    """One part, whose output a rank may have without its history."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.block = Block()

    def forward(self, x: torch.Tensor, detached: bool) -> torch.Tensor:
        y = self.block(self.layer(x))
        return y.detach() if detached else y


@MEMORY
@WRAPPER_FRONTS
@on_ranks(2)
def test_another_forward_follows_one_whose_outputs_need_gradients_on_some_ranks_only(
    front: str, shared_memory: bool
) -> None:
    options = placed("FULL_SHARD", shared_memory=shared_memory)
    beside = Beside(Detached(), front, **options)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    for _ in range(3):
        for detaching in (1, 0):
            beside.ours(x, detached=dist.get_rank() == detaching)
        beside.train(lambda model, x: model(x, False).pow(2).mean())


@MEMORY
@WRAPPER_FRONTS
@on_ranks(2, 3)
def test_a_retained_graph_and_a_later_one_go_backward_together(front: str, shared_memory: bool, rank: int) -> None:
    skips: Skips = {0: (0,), 1: (-1,)}
    options = placed("FULL_SHARD", shared_memory=shared_memory)
    beside = Beside(Skipping(), front, **options)
    for step in range(3):
        rows, skipped = batch(rank, step), skipped_by(rank, skips)
        losses = [beside.ours(rows + index, skipped).pow(2).mean() for index in range(2)]
        losses[0].backward(retain_graph=True)
        torch.stack(losses).sum().backward()
        beside.follow(loss_with(skips), step)
        beside.follow(loss_with(skips, skips), step)
        beside.check_gradients(f"gradients of step {step}")
        beside.step()
    beside.check_parameters()
