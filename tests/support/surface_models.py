"""Small models, data and comparisons for the tests of the training surface."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerModuleWrapPolicy

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support.beside import average_gradients
from tests.support.kit import full_grads, full_params
from tests.support.models import NormedBlock
from tests.support.peer import peer_fsdp

WIDTH = 7
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
ALL_STRATEGIES = (*STRATEGIES, "_HYBRID_SHARD_ZERO2")


def small_model(*, dropout: float = 0.0, num_blocks: int = 2) -> nn.Sequential:
    """Blocks between two layers that belong to the outermost unit; the same weights on every rank."""
    torch.manual_seed(0)
    blocks = [NormedBlock(dropout=dropout) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(5, WIDTH), *blocks, nn.Linear(WIDTH, 3))


def batches(num_ranks: int, *, step: int = 0, rows: int = 6, width: int = 5) -> torch.Tensor:
    """Each rank's rows, (rank, row, feature): the same on every rank that asks."""
    return torch.randn(num_ranks, rows, width, generator=torch.Generator().manual_seed(100 + step))


def sharded(model: nn.Module, strategy: str = "FULL_SHARD", *, classes: Any = (NormedBlock,), **kwargs: Any) -> FSDP:
    """``model`` with each block as a unit."""
    kwargs.setdefault("device_mesh", mesh_for(strategy))
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy(set(classes)) if classes else None,
        **kwargs,
    )


def sharded_by_peer(model: nn.Module, strategy: str, *, classes: Any = (NormedBlock,), **kwargs: Any) -> nn.Module:
    """The same from torch's FSDP1."""
    kwargs.setdefault("device_mesh", mesh_for(strategy))
    kwargs.setdefault("auto_wrap_policy", PeerModuleWrapPolicy(set(classes)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peer_fsdp(model, sharding_strategy=peer_library.ShardingStrategy[strategy], **kwargs)


def mesh_for(strategy: str) -> Any:
    """A mesh that shards over two ranks and replicates over the rest, for hybrid strategies; else None."""
    if "HYBRID" not in strategy:
        return None
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))


def grads_or_zeros(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return unsharded gradients by name, zeros where there is none. Every rank must call this."""
    params = full_params(model)
    return {name: torch.zeros_like(params[name]) if grad is None else grad for name, grad in full_grads(model).items()}


def plain_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of a plain model by name, zero where there is none."""
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
        for name, param in model.named_parameters()
    }


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradient reaches every parameter."""
    return model(batch).float().pow(2).mean()


def mean_grads(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a plain model by name, zeros where there is none, of the mean over ranks of its losses."""
    loss.backward()
    average_gradients(model)
    return plain_grads(model)


def sgd_step(params: Sequence[torch.Tensor], lr: float = 0.1) -> None:
    """The plainest optimizer, for gradients in any dtype."""
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.add_(param.grad.to(param.dtype), alpha=-lr)
                param.grad = None


def assert_near(actual: Any, expected: Any, relative: float, what: str) -> None:
    """Dtypes and shapes are the same; the largest difference is at most ``relative`` of the largest element.

    Tensors whose elements are all below 0.01 (gradients that ought to be zero) count as if one were 0.01.
    """
    __tracebackhide__ = True
    if isinstance(expected, torch.Tensor):
        got, want = (actual.dtype, tuple(actual.shape)), (expected.dtype, tuple(expected.shape))
        assert got == want, f"{what}: got {got}, expected {want}"
        if expected.numel():
            # Integers and bools have to be equal, and so has what is no number.
            exact = not expected.is_floating_point()
            wide, reference = actual.detach().double(), expected.detach().double()
            scale = 0.0 if exact else relative * max(reference.abs().max().item(), 1e-2)
            difference = (wide - reference).abs().max().item()
            assert difference <= scale, f"{what}: differs by {difference:.3g}, allowed {scale:.3g}"
        return
    assert list(actual) == list(expected), f"{what}: keys {list(actual)}, expected {list(expected)}"
    for key, value in expected.items():
        assert_near(actual[key], value, relative, f"{what}[{key!r}]")


def count_events(events: list[tuple[str, str]], event: str) -> dict[str, int]:
    """How often ``event`` happened, by unit."""
    return dict(Counter(unit for name, unit in events if name == event))
