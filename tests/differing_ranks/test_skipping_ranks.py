"""Units that every rank runs and whose outputs only some ranks use: the mean with zeros, and no disagreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import BackwardPrefetch
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import BLOCKS, Block, wrapped
from tests.support.pairs import KINDS, MEMORY, ROWS, WIDTH, Pair, batch, by_hand, by_policy, placed

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

    def loss_of(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        losses = [model(x + index, skipped_by(rank, skips)).pow(2).mean() for index, skips in enumerate(forwards)]
        return torch.stack(losses).sum()

    return loss_of


def train(pair: Pair) -> None:
    """Two steps with each set of skips, then one where everything is used."""
    for number, skips in enumerate(SKIPS):
        for repeat in range(2):
            step = 2 * number + repeat
            pair.backward(loss_with(skips), step)
            pair.check_gradients(f"gradients where {skips} are skipped, for the {repeat + 1}. time")
            pair.step(lr=0.02)
    pair.check_parameters()


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


@KINDS
@LAYOUTS
@on_ranks(2, timeout=20)
def test_a_unit_that_only_some_ranks_use_gets_the_mean_with_zeros(
    layout: str, use_orig_params: bool, shared_memory: bool
) -> None:
    train(Pair.of(Skipping(), use_orig_params=use_orig_params, **placed(layout, shared_memory=shared_memory)))


@MEMORY
@pytest.mark.parametrize("layout", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD 2x2", "HYBRID_SHARD 4x1"])
@on_ranks(4, timeout=20)
def test_a_unit_that_only_some_of_four_ranks_use_gets_the_mean_with_zeros(layout: str, shared_memory: bool) -> None:
    train(Pair.of(Skipping(), use_orig_params=True, **placed(layout, shared_memory=shared_memory)))


@MEMORY
@pytest.mark.parametrize("use_orig_params, layout", [(False, "FULL_SHARD"), (True, "SHARD_GRAD_OP")])
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_POST, None], ids=["after", "none"])
@on_ranks(2, timeout=20)
def test_the_same_holds_for_other_prefetches(
    prefetch: BackwardPrefetch | None, layout: str, use_orig_params: bool, shared_memory: bool
) -> None:
    options = placed(layout, shared_memory=shared_memory)
    train(Pair.of(Skipping(), use_orig_params=use_orig_params, backward_prefetch=prefetch, **options))


@KINDS
@pytest.mark.parametrize("wrap", [by_policy, by_hand])
@pytest.mark.parametrize("skips", [SKIPS[0], SKIPS[2], SKIPS[5], SKIPS[7]], ids=str)
@on_ranks(2, timeout=20)
def test_the_same_holds_in_the_very_first_step(skips: Skips, wrap: Any, use_orig_params: bool) -> None:
    Pair.of(Skipping(), wrap=wrap, use_orig_params=use_orig_params).train(loss_with(skips), num_steps=2)


@KINDS
@LAYOUTS
@on_ranks(2, timeout=20)
def test_two_forwards_that_skip_different_units_before_one_backward_equal_the_replica(
    layout: str, use_orig_params: bool, shared_memory: bool
) -> None:
    pair = Pair.of(Skipping(), use_orig_params=use_orig_params, **placed(layout, shared_memory=shared_memory))
    for step, (skips, others) in enumerate(zip(SKIPS, OTHERS, strict=True)):
        pair.backward(loss_with(skips, others), step)
        pair.check_gradients(f"gradients where {skips} and then {others} are skipped")
        pair.step(lr=0.02)
    pair.check_parameters()


@KINDS
@on_ranks(2, timeout=20)
def test_a_unit_that_every_rank_runs_and_none_uses_keeps_no_gradient(use_orig_params: bool) -> None:
    pair = Pair.of(Skipping(), use_orig_params=use_orig_params)
    for step, block in enumerate([0, 1, 2, 1]):
        pair.backward(loss_with({block: (0, -1)}), step)
        assert pair.plain.blocks[block].up.weight.grad is None
        pair.check_gradients(f"gradients where no rank uses block {block}")
        pair.step(lr=0.02)


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


@KINDS
@MEMORY
@on_ranks(2, timeout=20)
def test_a_loss_of_the_step_before_that_is_still_held_changes_nothing(
    use_orig_params: bool, shared_memory: bool
) -> None:
    options = placed("FULL_SHARD", shared_memory=shared_memory)
    options |= {"auto_wrap_policy": ModuleWrapPolicy({SkippingItself}), "use_orig_params": use_orig_params}
    pair = Pair.of(StochasticDepth(), wrap=wrapped, **options)
    held: dict[tuple[nn.Module, int], list[torch.Tensor]] = {}

    def held_loss(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        losses = held.setdefault((model, rank), [])
        # Ranks take turns to use the first blocks.
        losses.append(model(x, (0, 1) if (rank + len(losses)) % 2 else ()).pow(2).mean())
        return losses[-1]

    pair.train(held_loss, num_steps=3)


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
@pytest.mark.parametrize("use_orig_params, layout", [(False, "FULL_SHARD"), (True, "FULL_SHARD"), (True, "NO_SHARD")])
@pytest.mark.parametrize("skipping", [0, 1])
@on_ranks(2, timeout=20)
def test_a_unit_inside_another_that_one_rank_skips_equals_the_replica(
    skipping: int, layout: str, use_orig_params: bool, shared_memory: bool
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = Wide()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.head(self.wide(x, both))

    def wrap(module: nn.Module, **kwargs: Any) -> Any:
        module.wide = wrapped(module.wide, auto_wrap_policy=BLOCKS, **kwargs)
        return wrapped(module, **kwargs)

    options = placed(layout, shared_memory=shared_memory)
    pair = Pair.of(Outer(), wrap=wrap, use_orig_params=use_orig_params, **options)
    pair.train(lambda model, x, rank: model(x, rank != skipping).pow(2).mean(), num_steps=3)


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
@KINDS
@on_ranks(2, timeout=20)
def test_another_forward_follows_one_whose_outputs_need_gradients_on_some_ranks_only(
    use_orig_params: bool, shared_memory: bool
) -> None:
    options = placed("FULL_SHARD", shared_memory=shared_memory)
    pair = Pair.of(Detached(), use_orig_params=use_orig_params, **options)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    for step in range(3):
        for detaching in (1, 0):
            pair.model(x, detached=dist.get_rank() == detaching)
        pair.backward(lambda model, x, rank: model(x, False).pow(2).mean(), step)
        pair.check_gradients(f"gradients of step {step}")
        pair.step(lr=0.02)
    pair.check_parameters()


@MEMORY
@KINDS
@on_ranks(2, 3)
def test_a_retained_graph_and_a_later_one_go_backward_together(
    use_orig_params: bool, shared_memory: bool, rank: int
) -> None:
    skips: Skips = {0: (0,), 1: (-1,)}
    options = placed("FULL_SHARD", shared_memory=shared_memory)
    pair = Pair.of(Skipping(), use_orig_params=use_orig_params, **options)
    for step in range(3):
        rows, skipped = batch(rank, step), skipped_by(rank, skips)
        losses = [pair.model(rows + index, skipped).pow(2).mean() for index in range(2)]
        losses[0].backward(retain_graph=True)
        torch.stack(losses).sum().backward()
        pair.follow(loss_with(skips), step)
        pair.follow(loss_with(skips, skips), step)
        pair.check_gradients(f"gradients of step {step}")
        pair.step(lr=0.02)
    pair.check_parameters()
