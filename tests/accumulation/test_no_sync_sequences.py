"""Backwards in and out of ``no_sync``, each through some of the units: gradients after each reduced one are the sum.

A unit's part in a sequence is a pattern: the backwards that go through it. Sequences of one and two backwards are all
here. Of three and four, every unit has every pattern, with every choice of backwards inside ``no_sync``; the last one
is always outside. What the units do at the same time is chosen so that no backward is without a unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.support import assert_close, on_ranks
from tests.support.beside import MEMORY, WIDTH, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.selection import some

NUM_UNITS = 3
MODES = pytest.mark.parametrize("mode", ["local", "sharded"])
# For each backward the units that it goes through, and whether it is inside no_sync.
Sequence = tuple[tuple[tuple[int, ...], bool], ...]


class Branch(nn.Linear):
    """One unit."""


class Branches(nn.Module):
    """A layer of the root's own, and units beside each other behind it.

    Args:
        calls_all: every unit runs, also where the loss does not need it.
        reentrant: each unit inside a re-entrant checkpoint.
    """

    def __init__(self, *, calls_all: bool, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3)
        self.units = nn.ModuleList([Branch(3, 2) for _ in range(NUM_UNITS)])
        self.calls_all = calls_all
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        total = x.sum() * 0
        for index, unit in enumerate(self.units):
            if self.calls_all or index in which:
                y = checkpoint(unit, x, use_reentrant=True) if self.reentrant else unit(x)
                if index in which:
                    total = total + y.pow(2).mean()
        return total


def sequences(num_backwards: int) -> Iterator[Sequence]:
    """Those of a length; see the top of this file."""
    patterns = list(itertools.product([False, True], repeat=num_backwards))
    for in_no_sync in itertools.product([False, True], repeat=num_backwards - 1):
        for triple in triples(patterns):
            backwards = [tuple(u for u in range(NUM_UNITS) if triple[u][i]) for i in range(num_backwards)]
            if all(backwards):
                yield tuple(zip(backwards, (*in_no_sync, False), strict=True))


def triples(patterns: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Patterns of the three units."""
    size = len(patterns)
    if size <= 4:
        yield from itertools.product(patterns, repeat=NUM_UNITS)
        return
    for index in range(size):
        # The complement beside each pattern, so that no backward is empty; 5 is odd, so the third has all of them too.
        yield patterns[index], patterns[size - 1 - index], patterns[(5 * index + 3) % size]


def own_grads(model: FSDP) -> list[torch.Tensor | None]:
    """What an optimizer of this rank would use."""
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def branches(front: str, calls_all: bool, reentrant: bool, **options: Any) -> Beside:
    return Beside(Branches(calls_all=calls_all, reentrant=reentrant), front, units=(Branch,), **options)


class Grid:
    """Runs sequences on one model. Gradients add up, so what each unit adds in each backward is found out once."""

    def __init__(self, front: str, calls_all: bool, reentrant: bool, **options: Any) -> None:
        self.beside = branches(front, calls_all, reentrant, **options)
        self.parts: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        for unit, step in itertools.product(range(NUM_UNITS), range(4)):
            self.beside.zero_grad()
            self.beside.backward(lambda model, x, unit=unit: model(x, (unit,)), step)
            self.beside.check_gradients(f"gradients of unit {unit} alone")
            self.parts[unit, step] = own_grads(self.beside.ours)

    def run(self, sequence: Sequence, mode: Any) -> None:
        """One sequence, compared after each backward that is reduced."""
        __tracebackhide__ = True
        model, rank = self.beside.ours, dist.get_rank()
        model.zero_grad()
        expected: list[torch.Tensor | None] = [None for _ in model.parameters()]
        for step, (which, in_no_sync) in enumerate(sequence):
            with model.no_sync(mode=mode) if in_no_sync else nullcontext():
                model(batch(rank, step), which).backward()
            for unit in which:
                expected = [added(a, b) for a, b in zip(expected, self.parts[unit, step], strict=True)]
            if not in_no_sync:
                got = own_grads(model)
                if "flat" in self.beside.sharded:
                    # One flat gradient a unit: zero and None are the same to it.
                    expected_here = [zero_like(b) if a is None else a for a, b in zip(expected, got, strict=True)]
                else:
                    expected_here = expected
                assert_close(got, expected_here, rtol=1e-9, atol=1e-11, what=f"after backward {step}")


def zero_like(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else torch.zeros_like(grad)


def added(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a + b


def run_all(grid: Grid, mode: str, lengths: tuple[int, ...]) -> None:
    """Run every sequence of these lengths; the error has how many were wrong and the first three."""
    wrong: list[str] = []
    total = 0
    for length in lengths:
        for sequence in some(sequences(length), 5 if length > 2 else 1):
            total += 1
            try:
                grid.run(sequence, mode)
            except AssertionError as error:
                wrong.append(f"{described(sequence)}: {error}")
    assert total
    assert not wrong, f"{len(wrong)} of {total} sequences are wrong:\n" + "\n".join(wrong[:3])


def described(sequence: Sequence) -> str:
    return ", ".join(f"units {which}{' in no_sync' if inside else ''}" for which, inside in sequence)


@WRAPPER_FRONTS
@on_ranks(2)
def test_every_sequence_of_two_and_every_pattern_of_four_backwards_equals_the_sum(front: str) -> None:
    run_all(Grid(front, calls_all=False, reentrant=False), "local", (1, 2, 4))


@MODES
@WRAPPER_FRONTS
@pytest.mark.parametrize(
    "reentrant, calls_all",
    [(False, False), (True, False), (True, True)],
    ids=["plain", "re-entrant checkpoints", "re-entrant checkpoints, runs all"],
)
@on_ranks(2)
def test_every_pattern_of_three_backwards_equals_the_sum(
    reentrant: bool, calls_all: bool, front: str, mode: str
) -> None:
    run_all(Grid(front, calls_all, reentrant), mode, (3,))


# The layout, whether ranks share memory, and the kind of parameters.
ELSEWHERE = [
    ("SHARD_GRAD_OP", True, "originals"),
    ("SHARD_GRAD_OP", True, "flat"),
    ("NO_SHARD", True, "originals"),
    ("NO_SHARD", True, "flat"),
    ("HYBRID_SHARD 2x1", True, "originals"),
    ("_HYBRID_SHARD_ZERO2 1x2", True, "originals"),
    ("FULL_SHARD", False, "originals"),
]


@pytest.mark.parametrize("layout, shared_memory, front", ELSEWHERE)
@on_ranks(2)
def test_every_pattern_of_three_backwards_equals_the_sum_under_other_strategies(
    layout: str, shared_memory: bool, front: str
) -> None:
    options = placed(layout, shared_memory=shared_memory)
    run_all(Grid(front, calls_all=False, reentrant=False, **options), "local", (3,))


@on_ranks(4)
def test_every_pattern_of_three_backwards_equals_the_sum_on_a_two_by_two_mesh() -> None:
    run_all(Grid("originals", calls_all=False, reentrant=False, **placed("HYBRID_SHARD 2x2")), "local", (3,))


@MODES
@WRAPPER_FRONTS
@MEMORY
@pytest.mark.parametrize("layout", ["FULL_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_ranks_that_use_other_units_in_no_sync_get_the_mean_with_zeros(
    layout: str, shared_memory: bool, front: str, mode: Any, rank: int
) -> None:
    """Every rank runs every unit. The second rank's loss uses the units one further on."""
    beside = branches(front, calls_all=True, reentrant=False, **placed(layout, shared_memory=shared_memory))
    for sequence in [*sequences(3)][::5]:
        beside.zero_grad()
        for step, (which, in_no_sync) in enumerate(sequence):

            def loss_of(model: nn.Module, x: torch.Tensor, which: tuple[int, ...] = which) -> torch.Tensor:
                return model(x, tuple((unit + rank) % NUM_UNITS for unit in which))

            with beside.ours.no_sync(mode=mode) if in_no_sync else nullcontext():
                loss_of(beside.ours, batch(rank, step)).backward()
            beside.follow(loss_of, step)
            if not in_no_sync:
                beside.check_gradients(f"{described(sequence)}: after backward {step}")
