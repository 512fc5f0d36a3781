"""Adapts to torch.distributed: names that changed from torch 2.8 to 2.15, private names, and the end of the process."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Returns whether a profiler is running; the public ways to ask take much longer.
profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled

# 2.13 renamed these two and warns about the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of a group; torch has no public accessor for it."""
    store: dist.Store = dist.distributed_c10d._world.pg_map[group][1]
    return store


@functools.cache
def leave_time_for_gloo() -> None:
    """Let the end of this process wait 0.1 s; callers begin a collective of gloo.

    gloo's threads need the interpreter to release the tensors of a collective that has ended. If one still waits for it
    when the interpreter ends, Python before 3.14 aborts the process ("terminate called without an active exception").
    So a process that ends right after a collective, as after a save, leaves the interpreter to them for a moment, long
    enough for the system to run them beside other processes.
    """
    atexit.register(time.sleep, 0.1)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend object of a group for tensors of ``device``, which no public function returns, or None."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def gloo_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a group's gloo backend for CPU tensors in seconds."""
    timeout_s: float = backend_of(group, torch.device("cpu")).options._timeout.total_seconds()
    return timeout_s


def tensor_allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return the ``allocate_tensor(numel, dtype=, device=)`` of a group's backend; None if it has none."""
    backend = backend_of(group, device)
    supports = getattr(backend, "supports_tensor_alloc", None)
    return backend.allocate_tensor if supports is not None and supports(device) else None
