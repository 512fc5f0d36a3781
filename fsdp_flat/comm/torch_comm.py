"""Adapts to torch.distributed: names that changed from torch 2.8 to 2.15, private names, and the end of the process."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors

# gloo's threads need the interpreter to release the tensors of a collective that has ended. If one still waits for it
# when the interpreter ends, Python before 3.14 aborts the process ("terminate called without an active exception").
# So a process that ends right after a collective, as after a save, leaves the interpreter to them for a moment,
# long enough for the system to run them beside other processes.
atexit.register(time.sleep, 0.1)

# Concatenates tensors of one dtype, flattened, by one operation; DistributedDataParallel flattens its buckets by it.
flatten_dense: Callable[[list[torch.Tensor]], torch.Tensor] = _flatten_dense_tensors

# 2.13 renamed these two and warns about the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of a group; torch has no public accessor for it."""
    store: dist.Store = dist.distributed_c10d._world.pg_map[group][1]
    return store


def tensor_allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return the ``allocate_tensor(numel, dtype=, device=)`` of a group's backend; None if it has none.

    Only backend objects have it, which no public function returns.
    """
    backend: Any = group._get_backend(device)
    supports = getattr(backend, "supports_tensor_alloc", None)
    return backend.allocate_tensor if supports is not None and supports(device) else None
