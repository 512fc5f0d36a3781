"""Models whose steps are rehearsed, and how tests are given strategies and kinds of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_flat import CPUOffload, MixedPrecision, ShardingStrategy
from tests.rehearsal.fake_device import DEVICE
from tests.support.kit import WIDTH
from tests.support.models import Block
from tests.support.steps import STRATEGIES

BOTH_KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
# Where options are many, two strategies, each with one kind of parameters.
PAIRS = pytest.mark.parametrize(
    "strategy, use_orig_params",
    [(ShardingStrategy.FULL_SHARD, True), (ShardingStrategy.HYBRID_SHARD, False)],
    ids=["FULL_SHARD-orig", "HYBRID_SHARD-flat"],
)

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffload(offload_params=True)
# Before the optimizer, which runs on the host, the host has to wait for gradients: at the end, for an event.
FOR_GRADIENTS = ("host wait: event synchronize",)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed anew in backward."""

    def __init__(self, use_reentrant: bool, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.use_reentrant = use_reentrant
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.order:
            x = checkpoint(self.blocks[index], x, use_reentrant=self.use_reentrant)
        return x


class Partial(nn.Module):
    """Blocks of which one does not run, behind a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 3):
            x = self.blocks[index](x)
        return x


class Tied(nn.Module):
    """Two layers of the root with one weight, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Twice(nn.Module):
    """A block that runs twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0):
            x = self.blocks[index](x)
        return x


def on_device(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model on the accelerator."""
    with DEVICE:
        return make()
