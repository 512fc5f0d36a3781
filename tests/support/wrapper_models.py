"""Small models for the wrapper's tests, wrapped by us or by torch's FSDP1 with the same words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close
from tests.support.kit import no_shard_allowed, normal, train_on
from tests.support.models import BufferedBlock, Model
from tests.support.peer import peer_fsdp, peer_warnings_silenced

WIDTH = 5


def seeded(make: Callable[[], nn.Module] = Model, seed: int = 0) -> Any:
    """The same new model on every rank that asks."""
    torch.manual_seed(seed)
    return make()


def mesh_options(strategy: str) -> dict[str, Any]:
    """A mesh of two replicas for hybrid strategies. Every rank must call this."""
    return {"device_mesh": init_device_mesh("cpu", (2, 2))} if "HYBRID" in strategy else {}


def shard(model: nn.Module, strategy: str = "FULL_SHARD", *, by_blocks: bool = True, **kwargs: Any) -> Any:
    """``model`` wrapped by us, by default with each block as a unit."""
    if by_blocks:
        kwargs.setdefault("auto_wrap_policy", ModuleWrapPolicy({BufferedBlock}))
    with no_shard_allowed():
        return FSDP(model, sharding_strategy=ShardingStrategy[strategy], **kwargs)


def shard_by_peer(model: nn.Module, strategy: str = "FULL_SHARD", *, by_blocks: bool = True, **kwargs: Any) -> Any:
    """``model`` wrapped by torch's FSDP1 in the same way."""
    if by_blocks:
        kwargs.setdefault("auto_wrap_policy", peer_library.wrap.ModuleWrapPolicy({BufferedBlock}))
    with peer_warnings_silenced():
        return peer_fsdp(model, sharding_strategy=peer_library.ShardingStrategy[strategy], **kwargs)


def batch(rank: int, step: int = 0, rows: int = 4) -> torch.Tensor:
    """One rank's input of one step, (row, 3)."""
    return normal(1000 + 10 * step + rank, rows, 3)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range,
    data: Callable[[int, int], torch.Tensor] = batch,
) -> list[float]:
    """Steps on one rank's data; the losses."""
    return [loss.item() for loss in train_on(model, optimizer, [data(rank, step) for step in steps])]


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict as plain tensors with no tie to the model. Every rank must call this."""
    with peer_warnings_silenced():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_grads(ours: nn.Module, theirs: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert that what this rank holds of each gradient is the same; a slice without elements has none to compare."""
    __tracebackhide__ = True
    mine, others = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert sorted(mine) == sorted(others)
    for name, param in mine.items():
        other = others[name]
        assert param.shape == other.shape, name
        if param.numel() > 0:
            assert_close(param.grad, other.grad, rtol=rtol, atol=atol, what=name)


def message(kind: type[Exception], builtin: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that ``call`` raises, which is of our kind and of FSDP1's built-in type."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, builtin), caught.type.__mro__
    return str(caught.value)
