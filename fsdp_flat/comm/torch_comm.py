"""Adapts to torch.distributed: names that changed from torch 2.8 to 2.15, private names, and the end of the process."""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.utils import _python_dispatch

# Time after which a store that has not answered is given up: its client would wait for a lost connection for minutes.
_STORE_TIMEOUT_S = 3.0
# The last thread that made a request to a store, which answers one at a time.
_asking: weakref.WeakKeyDictionary[dist.Store, threading.Thread] = weakref.WeakKeyDictionary()
# Returns whether a profiler is running; the public ways to ask take much longer.
profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled

# Whether memory can move from one storage to another (``swap_memory`` of ``core``), from torch 2.12 on.
MOVES_MEMORY = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

# 2.13 renamed these two and warns about the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def unseen_by_modes() -> AbstractContextManager[Any]:
    """Hide operations inside the block from dispatch modes, of which ``CommDebugMode`` counts collectives.

    There is no public way to leave a mode that a caller has entered.
    """
    return _python_dispatch._disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


# Returns whether a transform of ``torch.func`` is running, and a context that hides operations from it, as FSDP2's
# hooks do: such a transform refuses writes to captured tensors, as those of an all-gather.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
unseen_by_transforms: Callable[[], AbstractContextManager[Any]] = torch._C._DisableFuncTorch


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of a group; torch has no public accessor for it."""
    store: dist.Store = dist.distributed_c10d._world.pg_map[group][1]
    return store


def ask_store(group: dist.ProcessGroup, request: Callable[[dist.Store], object]) -> None:
    """Make a request to a group's store; return without an answer if either is gone, or the store takes too long."""

    def run() -> None:
        with suppress(Exception):
            request(store)

    with suppress(Exception):
        store = group_store(group)
        earlier = _asking.get(store)
        if earlier is None or not earlier.is_alive():
            thread = _asking[store] = threading.Thread(target=run, name="fsdp_flat_store", daemon=True)
            thread.start()
            thread.join(_STORE_TIMEOUT_S)


def new_group(
    ranks: Sequence[int], name: str, *, backend: str | None, timeout: timedelta, description: str
) -> dist.ProcessGroup:
    """Create a process group of global ``ranks``, all of which must call this with the same ``name``; no others do.

    ``torch.distributed.new_group(use_local_synchronization=True)`` derives a name from the number of groups that a rank
    is in, so ranks would wait for each other under different names where that differs.
    """
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[default]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend or default_backend),
        store,
        name,
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=description,
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    created: dist.ProcessGroup = group
    return created


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


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's collectives; torch has no public accessor for it."""
    for device in filter(None, (torch.device("cpu"), torch.accelerator.current_accelerator())):
        # Some backends have no options, torch's "fake" one for instance.
        with suppress(AttributeError, RuntimeError):
            timeout: timedelta = backend_of(group, device).options._timeout
            return timeout
    return default_pg_timeout


def tensor_allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return the ``allocate_tensor(numel, dtype=, device=)`` of a group's backend; None if it has none."""
    backend = backend_of(group, device)
    supports = getattr(backend, "supports_tensor_alloc", None)
    return backend.allocate_tensor if supports is not None and supports(device) else None


def symmetric_allocator(group: dist.ProcessGroup, device: torch.device, backend: Any) -> Callable[..., torch.Tensor]:
    """Return what allocates symmetric memory by ``(size, *, dtype, device)`` and makes it known in a group.

    Every rank of the group must call this, and what it returns in the same order. Memory that is freed is used again,
    and known already.

    Raises:
        RuntimeError: there is none on this device, or in this torch or backend.
    """
    if device.type != "cuda":
        raise RuntimeError(f"{device} has none")
    from torch.distributed import _symmetric_memory as symmetric

    if not hasattr(symmetric, "get_mem_pool"):
        raise RuntimeError(f"torch {torch.__version__} has no memory pool of it")
    symmetric.set_backend(backend)
    # The backend makes its communicator at the first collective.
    dist.barrier(group=group, device_ids=[device.index])
    pool = symmetric.get_mem_pool(device)

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(size, dtype=dtype, device=device)
        symmetric.rendezvous(tensor, group=group.group_name)
        return tensor

    allocate((1,), dtype=torch.uint8, device=device)  # or raise
    return allocate
