"""Small models and helpers that tests of sharded training share: wrapping, meshes, and unsharded values by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.layout import clean_fqn
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support.models import Block, Stack
from tests.support.transport import mesh_type

WIDTH = 8
ROWS = 3


BLOCKS = ModuleWrapPolicy({Block})


class Trouble(Exception):
    """Raised on purpose, in a forward or a backward."""


class RaisesInBackward(torch.autograd.Function):
    """Passes through, and raises on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Trouble("in backward")


def seeded(make: Callable[[], Any] = Stack, seed: int = 0) -> Any:
    """Make the same new model on every rank that asks."""
    torch.manual_seed(seed)
    return make()


def normal(seed: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the same normal numbers on every rank that asks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def batch(
    rank: int, step: int = 0, width: int = 8, num_rows: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a rank's rows in a step."""
    return normal(1000 * step + rank, num_rows, width, dtype=dtype)


@contextmanager
def no_shard_allowed() -> Iterator[None]:
    """Ignore FSDP1's warnings about NO_SHARD and single ranks, which other tests check."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="NO_SHARD keeps full", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*over a single rank", category=UserWarning)
        yield


def wrapped(module: nn.Module, **kwargs: Any) -> FSDP:
    """Shard ``module`` without the warnings that :func:`no_shard_allowed` ignores."""
    with no_shard_allowed():
        return FSDP(module, **kwargs)


def mesh(num_replicas: int, num_shards: int) -> DeviceMesh:
    """Create a 2-D mesh over all ranks. Every rank must call this."""
    return init_device_mesh(mesh_type(), (num_replicas, num_shards), mesh_dim_names=("replicate", "shard"))


def square_loss(model: nn.Module, x: torch.Tensor, _rank: int = 0) -> torch.Tensor:
    """Compute a loss that is not linear in the parameters."""
    return model(x).pow(2).mean()


def train_on(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Iterable[Any],
    loss_of: Callable[[Any, Any], torch.Tensor] = square_loss,
    *,
    before_step: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """Take one optimizer step on each input, and return the losses; the gradients of the last step stay."""
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def full_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all unsharded parameters, by their names in the plain model. Every rank must call this."""
    with FSDP.summon_full_params(model, writeback=False):
        return {clean_fqn(name): param.detach().clone() for name, param in model.named_parameters()}


def full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of all unsharded gradients, by the names of their parameters. Every rank must call this."""
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        return {
            clean_fqn(name): None if param.grad is None else param.grad.clone()
            for name, param in model.named_parameters()
        }
