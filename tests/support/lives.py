"""What the tests of a wrapped model's life share: training it and the plain model side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close
from tests.support.kit import square_loss, train_on
from tests.support.reference import replicated_step
from tests.support.wrapper_models import Model, Tied, batch, seeded, whole_state

KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


def tokens(rank: int, step: int = 0) -> torch.Tensor:
    """One rank's input of a tied model."""
    return torch.randint(7, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def data_of(kind: str, rank: int, step: int) -> torch.Tensor:
    return tokens(rank, step) if kind == "tied" else batch(rank, step)


def make(kind: str) -> Any:
    return seeded(Tied if kind == "tied" else Model)


def train(model: nn.Module, steps: range, kind: str = "plain", lr: float = 0.1) -> None:
    """SGD with momentum on this rank's data, with an optimizer of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    train_on(model, optimizer, [data_of(kind, dist.get_rank(), step) for step in steps])


def train_reference(model: nn.Module, steps: range, kind: str = "plain", lr: float = 0.1) -> None:
    """The same on the plain model and all ranks' data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in steps:
        batches = [data_of(kind, rank, step) for rank in range(dist.get_world_size())]
        replicated_step(model, optimizer, batches, square_loss)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    __tracebackhide__ = True
    assert_close(whole_state(model), whole_state(plain), rtol=1e-5, atol=1e-6, what="state")
