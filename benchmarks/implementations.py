"""Wraps the model in each implementation, and skips gradient reduction during gradient accumulation."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.model import GPT, Block
from benchmarks.spec import Setting, is_fully_shard

CPU = torch.device("cpu")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's deprecation warnings, which differ between versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def library_of(name: str) -> ModuleType | None:
    """Import and return the package of an implementation with FSDP1's or FSDP2's API; None for the others.

    Call this before wrapping is timed, so that the import does not count.
    """
    if name.startswith(("fsdp1", "fsdp2")):
        return importlib.import_module("torch.distributed.fsdp")
    if not name.startswith("flat"):
        return None
    library = importlib.import_module("fsdp_flat")
    # Public names are imported when they are first used: here, and not where the time of wrapping is taken.
    _ = library.FullyShardedDataParallel, library.fully_shard
    return library


def wrap(name: str, model: GPT, setting: Setting, device: torch.device = CPU) -> nn.Module:
    """Wrap ``model`` in the implementation ``name``. Every rank must call this.

    Args:
        name: a key of ``IMPLEMENTATIONS``.
        model: a fresh model, the same on every rank.
        setting: the setting.
        device: device of compute.
    """
    if name == "local":
        return model
    if name == "ddp":
        return DistributedDataParallel(model)
    library: Any = library_of(name)
    if is_fully_shard(name):
        reshard = half_of(model, setting) if name.endswith("budget") else not name.endswith("no-reshard")
        return _fully_shard(library, model, setting, reshard)
    strategies = {"grad-op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}
    strategy = next((strategies[key] for key in strategies if key in name), "FULL_SHARD")
    chosen: Any = library.ShardingStrategy[strategy]
    if name.endswith("budget"):
        chosen = f"{strategy}:{half_of(model, setting)}"
    precision = library.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if setting.bf16 else None
    mesh = None
    if strategy == "HYBRID_SHARD":
        # Explicit, since torch derives the ranks of a host from the number of accelerators.
        mesh = init_device_mesh(device.type, (setting.hosts, setting.ranks // setting.hosts))
    with quiet():
        wrapped: nn.Module = library.FullyShardedDataParallel(
            model,
            auto_wrap_policy=library.wrap.ModuleWrapPolicy({Block}),
            device_mesh=mesh,
            sharding_strategy=chosen,
            mixed_precision=precision,
            use_orig_params=not name.endswith("flat"),
            device_id=device,
        )
    between = {"bfloat16": torch.bfloat16, "int8": torch.int8}.get(name.rpartition("-")[2])
    if between is not None:
        library.collectives.use_collectives(
            wrapped, param_dtype_between_hosts=between, reduce_dtype_between_hosts=between
        )
    return wrapped


def half_of(model: GPT, setting: Setting) -> str:
    """Return the bytes in compute of half of a model's parameters, as text."""
    return f"{sum(param.numel() for param in model.parameters()) * (2 if setting.bf16 else 4) // 2}B"


def _fully_shard(library: Any, model: GPT, setting: Setting, reshard: bool | str) -> nn.Module:
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    policy = library.MixedPrecisionPolicy()
    if setting.bf16:
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return library.fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


@contextmanager
def unreduced(name: str, model: nn.Module) -> Iterator[None]:
    """Do not reduce gradients of a backward inside the block."""
    if is_fully_shard(name):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with nullcontext() if name == "local" else model.no_sync():
            yield


def autocast_for(name: str, setting: Setting, device: str = "cpu") -> AbstractContextManager[Any]:
    """Return bf16 autocast for the implementations without mixed precision of their own."""
    on = setting.bf16 and name in ("local", "ddp")
    return torch.autocast(device, torch.bfloat16) if on else nullcontext()


def optimizer_for(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """Create Adam on ``model.parameters()``."""
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True if setting.fused else None)
