"""In a steady state every rank begins the same collectives in the same order, whatever its loss uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.models import Block


class SideBySide(nn.Module):
    """Every block runs; the loss uses those of ``which``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Wider(), Block()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        outputs = [block(x) for block in self.blocks]
        return self.head(x + sum(outputs[index] for index in which))


class Wider(Block):
    """Of another size, so that collectives of units can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(super().forward(x))


def loss_of(model: nn.Module, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
    return model(x, which).pow(2).mean()


class Recorder(TorchDispatchMode):
    """Notes what torch.distributed is asked for, in order, with the sizes of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.sequence.append(f"{func.name()} {[tensor.numel() for tensor in tensors]}")
        return func(*args, **(kwargs or {}))


def collectives_of(run: Callable[[], None]) -> list[str]:
    """The collectives that begin while ``run`` runs, its backward included."""
    with Recorder() as recorder:
        run()
    return recorder.sequence


# By rank, the blocks that the loss uses.
USES: list[list[tuple[int, ...]]] = [
    [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)],
    [(0, 1, 2), (0, 2), (0, 1, 2), (1,)],
    [(1, 2), (0, 1), (2,), (0,)],
    [(0,), (1,), (2,), (0, 1, 2)],
    [(), (0, 1, 2), (), (1,)],
]


def check(layout: str, front: str, rank: int, all_uses: list[list[tuple[int, ...]]]) -> None:
    beside = Beside(SideBySide(), front, **placed(layout, shared_memory=False))
    beside.train(lambda model, x: loss_of(model, x, (0, 1, 2)), num_steps=2)
    for number, uses in enumerate(all_uses):

        def step(uses: list[tuple[int, ...]] = uses, number: int = number) -> None:
            loss_of(beside.ours, batch(rank, number), uses[rank]).backward()

        sequence = collectives_of(step)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sequence)
        assert len(sequence) >= 4, "a reduction for each unit"
        for other, theirs in enumerate(everyone):
            assert theirs == sequence, f"rank {other} began others where losses use {uses}"
        beside.ours.zero_grad()


@WRAPPER_FRONTS
@pytest.mark.parametrize(
    "layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 1x2"]
)
@on_ranks(2)
def test_the_collectives_of_a_step_are_the_same_on_both_ranks_whatever_their_losses_use(
    layout: str, front: str, rank: int
) -> None:
    check(layout, front, rank, USES)


@pytest.mark.parametrize("layout", ["FULL_SHARD", "HYBRID_SHARD 2x2"])
@on_ranks(4)
def test_the_collectives_of_a_step_are_the_same_on_four_ranks_whatever_their_losses_use(layout: str, rank: int) -> None:
    check(layout, "originals", rank, USES)
