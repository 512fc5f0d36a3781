"""Trains a model of fully_shard beside torch's fully_shard and a plain replica, on the same batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

from tests.support.fully_shard_sides import blocks_and_root
from tests.support.kit import Block, Stack, batch, square_loss
from tests.support.peer import peer_fully_shard


def needs_of_torch(method: str) -> pytest.MarkDecorator:
    """Skip a test that compares with a method of torch's FSDPModule where the installed torch does not have it."""
    has_it = hasattr(TorchFSDPModule, method)
    return pytest.mark.skipif(not has_it, reason=f"FSDPModule of torch {torch.__version__} has no {method}")


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the full tensor of a DTensor, detached; every rank must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the full gradient of each parameter. Every rank must call this."""
    return {name: whole(param.grad) for name, param in model.named_parameters()}


@dataclass
class Beside:
    """Holds one model three times.

    Attributes:
        ours: sharded by the library.
        theirs: sharded by torch.
        plain: replicated.
    """

    ours: Any
    theirs: Any
    plain: Stack

    @classmethod
    def of(
        cls,
        model: Stack | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> Beside:
        """Shard two of three copies."""
        torch.manual_seed(0)
        plain = (model or Stack()).to(dtype)
        ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
        return cls(blocks_and_root(ours, **kwargs), blocks_and_root(theirs, peer_fully_shard, **kwargs), plain)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.plain.head.weight.dtype

    @property
    def both(self) -> tuple[Any, Any]:
        """The two sharded models."""
        return self.ours, self.theirs

    def units(self) -> list[tuple[Any, Any]]:
        """Return each module that is a unit, ours and theirs."""
        pairs = zip(self.ours.modules(), self.theirs.modules(), strict=True)
        return [(own, other) for own, other in pairs if isinstance(own, (Block, Stack))]

    def backward(self, number: int, *, models: Sequence[Any] | None = None) -> None:
        """Run forward and backward of the sharded models on this rank's batch."""
        for model in models or self.both:
            square_loss(model, batch(dist.get_rank(), number).to(self.dtype)).backward()

    def plain_backward(self, number: int, divisor: float | None = None) -> None:
        """Add every rank's gradients to the replica's, divided by the number of ranks or ``divisor``."""
        num_ranks = dist.get_world_size()
        for rank in range(num_ranks):
            (square_loss(self.plain, batch(rank, number).to(self.dtype)) / (divisor or num_ranks)).backward()

    def check_grads(self, *, replica: bool = True, **tolerance: Any) -> None:
        """Compare the gradients of the three models."""
        ours = grads_of(self.ours)
        expected = grads_of(self.theirs)
        for name, grad in ours.items():
            torch.testing.assert_close(grad, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")
        if replica:
            torch.testing.assert_close(ours, grads_of(self.plain), **tolerance)

    def zero_grad(self) -> None:
        for model in (*self.both, self.plain):
            model.zero_grad()
