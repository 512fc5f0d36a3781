"""Manages the memory of flat buffers, and the unsharded parameters that view one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from fsdp_flat.flat.arrangement import RowTarget, row_target, views_of
from fsdp_flat.flat.params import PLAIN, ManagedParam
from fsdp_flat.flat.torch_flat import VERSION_OF, is_alias, set_versions, swap_memory
from fsdp_flat.layout import FlatLayout

# Blocks of one size that the pool keeps.
_MOST_IDLE = 2


class MemoryPool:
    """Keeps a few freed blocks of CPU memory, so that the next buffer does not page-fault.

    The memory moves from one storage object to another: a view of a freed buffer, which autograd may hold, keeps an
    empty storage and never sees the data of another unit. Accelerators have caching allocators, so the pool keeps
    nothing for them, nor if torch cannot move memory between storages.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.UntypedStorage]] = {}
        self._blank: list[torch.UntypedStorage] = []  # objects without memory

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate ``nbytes`` for an empty ``storage``; the content is undefined."""
        idle = self._idle.get(nbytes)
        if idle and storage.device.type == "cpu":
            swap_memory(storage, idle[-1])
            self._blank.append(idle.pop())
        else:
            storage.resize_(nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage``, unless a numpy array uses it too."""
        nbytes = storage.nbytes()
        # A numpy array that a caller has made of a view points to memory that torch marks as not resizable.
        if nbytes == 0 or not storage.resizable():
            return
        idle = self._idle.setdefault(nbytes, [])
        if swap_memory is None or storage.device.type != "cpu" or len(idle) >= _MOST_IDLE:
            storage.resize_(0)
            return
        kept = self._blank.pop() if self._blank else torch.UntypedStorage(0)
        swap_memory(kept, storage)
        idle.append(kept)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape, dtype and device of ``tensor`` and undefined content."""
        idle = self._idle.get(tensor.nbytes)
        if not idle or tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        fresh = torch.empty(0, dtype=tensor.dtype)
        return fresh.set_(idle.pop(), 0, tensor.shape)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Return all memory of the pool to the system."""
        self._idle.clear()


class FlatBuffer:
    """Holds a 1-D tensor whose memory can be freed and allocated again while views of it exist.

    Autograd saves views of unsharded parameters. The storage object therefore stays and is resized to zero; once the
    same values are all-gathered again, all saved views are valid.

    Args:
        tensor: the tensor.
        owns_memory: False for the shard of a unit that is not sharded, which is its own buffer and is never freed.
    """

    def __init__(self, tensor: torch.Tensor, *, owns_memory: bool = True) -> None:
        self.tensor, self.owns_memory = tensor, owns_memory
        self._nbytes = tensor.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return self.tensor.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        """Allocate memory from ``pool`` unless it is allocated; the content is undefined."""
        if self.owns_memory:
            storage = self.tensor.untyped_storage()
            if storage.nbytes() != self._nbytes:
                pool.fill(storage, self._nbytes)

    def free(self, pool: MemoryPool) -> None:
        """Return the memory to ``pool``."""
        if self.owns_memory:
            pool.empty(self.tensor.untyped_storage())


# Added to version counters while parameters are freed, so that autograd refuses what it saved.
# docs/limitations.md names the number.
_EXPIRED = 10**9


class UnshardedParams:
    """Holds the unsharded parameters of one compute dtype, and the buffer that they view.

    While the buffer does not hold their values, the parameters are marked as changed: autograd, which compares versions
    whenever it unpacks a saved tensor, then raises. A backward unshards a unit when it reaches one of the outputs that
    were found. A tensor that a module stored elsewhere may be reached earlier, and would read freed memory.

    Args:
        shard: the handle's shard, which becomes the buffer if it holds the same values.
        dtype: compute dtype.

    Attributes:
        params: one Parameter per managed one, which modules see in compute; each has a version counter of its own.
        rows: places shards of ranks in the buffer, for a row layout over several ranks; else None.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        layout: FlatLayout,
        *,
        rank: int,
        device: torch.device,
        shard: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        is_shard = layout.world_size == 1 and dtype == shard.dtype and device == shard.device
        flat = shard if is_shard else torch.empty(layout.numel, dtype=dtype, device=device)
        self.buffer = FlatBuffer(flat, owns_memory=not is_shard)
        self.rows = row_target(flat, layout)
        self._own_slice = flat[layout.shard(rank).to_slice()]
        params = []
        for entry, view in zip(managed, views_of(flat, layout), strict=True):
            # ``.data`` gives the parameter a separate version counter, which refills of the buffer do not change.
            param = nn.Parameter(entry.adapter.from_local(view.data), requires_grad=False)
            # Attributes that a forward reads from parameters (weight decay flags, parallel dims) stay readable.
            param.__dict__.update(entry.param.__dict__)
            params.append(param)
        self.params = tuple(params)
        self._plain = [param for param, entry in zip(params, managed, strict=True) if entry.adapter is PLAIN]
        self._is_in_buffer = partial(is_alias, flat)
        self._versions: tuple[int, ...] | None = None
        self._filled: tuple[int, ...] | None = None
        self.free(MemoryPool())

    def load(self, shard: torch.Tensor, pool: MemoryPool) -> tuple[torch.Tensor, RowTarget | None]:
        """Allocate the buffer, and return the input of its all-gather: see :meth:`FlatParamHandle.begin_gather`."""
        buffer = self.buffer
        buffer.alloc(pool)
        if shard.device != buffer.tensor.device:
            # Copy in the shard's dtype first: a converting copy between devices would block the host.
            shard = shard.to(buffer.tensor.device, non_blocking=True)
        if self.rows is not None:
            dtype = buffer.tensor.dtype
            return shard if shard.dtype == dtype else shard.to(dtype), self.rows
        if buffer.owns_memory:
            self._own_slice.copy_(shard)
        return buffer.tensor, None

    def free(self, pool: MemoryPool) -> None:
        """Return the memory to ``pool``; from now on autograd refuses what it saved of the parameters."""
        # Where nothing is freed, nothing can be used too late.
        if self._versions is None and self.buffer.owns_memory:
            self._versions = tuple(map(VERSION_OF, self.params))
            set_versions(self.params, tuple([version + _EXPIRED for version in self._versions]))
        self.buffer.free(pool)

    def mark_filled(self) -> None:
        """Have autograd accept the parameters again: the buffer has their values."""
        if self._versions is not None:
            set_versions(self.params, self._versions)
            self._versions = None
        if self.buffer.owns_memory:
            self._filled = tuple(map(VERSION_OF, self.params))

    def written(self) -> list[int]:
        """Return the parameters that were written since the buffer was filled; none if the buffer is the shard."""
        filled = self._filled
        if filled is None or filled == tuple(map(VERSION_OF, self.params)):
            return []
        return [index for index, param in enumerate(self.params) if param._version != filled[index]]

    def drop_staging(self) -> None:
        """Drop the memory of an all-gather that failed."""
        if self.rows is not None:
            self.rows.drop_staging()

    @property
    def are_moved(self) -> bool:
        """True if parameters were given other memory than the buffer's, by an assignment to ``.data``."""
        return not all(map(self._is_in_buffer, self._plain))
