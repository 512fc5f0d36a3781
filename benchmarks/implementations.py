"""Shards a model by each implementation."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.spec import Implementation

CPU = torch.device("cpu")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's deprecation warnings, which differ between versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def library_of(each: Implementation) -> Any:
    """Import and return the package of a sharding implementation.

    Call this before wrapping is timed, so that the import does not count.
    """
    library = importlib.import_module(each.package)
    # Public names are imported when they are first used: here, and not where the time of wrapping is taken.
    _ = library.FullyShardedDataParallel, library.fully_shard
    return library


def shard(
    each: Implementation,
    model: Any,
    blocks: set[type[nn.Module]],
    *,
    bf16: bool = False,
    hosts: int = 1,
    offload: bool = False,
    device: torch.device = CPU,
) -> Any:
    """Shard a model, with a unit for each module of some classes. Every rank must call this.

    Args:
        each: the implementation.
        model: a fresh model, the same on every rank.
        blocks: the classes.
        bf16: compute in bf16, and reduce in fp32.
        hosts: number of shard groups of a hybrid strategy.
        offload: keep shards on the host.
        device: device of compute.
    """
    if not each.is_sharded:
        return DistributedDataParallel(model) if each.package else model
    library, is_hybrid = library_of(each), each.strategy == "HYBRID_SHARD"
    num_ranks = torch.distributed.get_world_size()
    # Explicit, since torch derives the ranks of a host from the number of accelerators.
    mesh = init_device_mesh(device.type, (hosts, num_ranks // hosts) if is_hybrid else (num_ranks,))
    half = f"{sum(param.numel() for param in model.parameters()) * (2 if bf16 else 4) // 2}B"
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    if each.is_wrapper:
        with quiet():
            wrapped = library.FullyShardedDataParallel(
                model,
                auto_wrap_policy=importlib.import_module(f"{each.package}.wrap").ModuleWrapPolicy(blocks),
                device_mesh=mesh if is_hybrid else None,
                sharding_strategy=f"{each.strategy}:{half}"
                if each.has_budget
                else library.ShardingStrategy[each.strategy],
                mixed_precision=library.MixedPrecision(**dtypes) if bf16 else None,
                # torch's pins offloaded shards, which a machine without an accelerator cannot do.
                cpu_offload=library.CPUOffload(offload and (each.is_ours or device.type != "cpu")),
                forward_prefetch=bool(each.num_prefetched),
                use_orig_params=each.use_orig_params,
                device_id=device,
            )
        if each.between_hosts:
            dtype = getattr(torch, each.between_hosts)
            library.collectives.use_collectives(
                wrapped, param_dtype_between_hosts=dtype, reduce_dtype_between_hosts=dtype
            )
        return wrapped
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": library.MixedPrecisionPolicy(**dtypes),
        "reshard_after_forward": half if each.has_budget else each.strategy != "SHARD_GRAD_OP",
    }
    if offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=device.type != "cpu")
    units = [module for module in model.modules() if type(module) in blocks]
    for module in (*reversed(units), model):  # inner units first
        library.fully_shard(module, **options)
    if num := each.num_prefetched:
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + num])
            unit.set_modules_to_backward_prefetch(units[max(0, index - num) : index][::-1])
        model.set_modules_to_forward_prefetch(units[:num])
        model.set_modules_to_backward_prefetch(units[-num:][::-1])
    return model
