"""Manages the memory of flat buffers: of unsharded parameters, which view one, and of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fsdp_flat.flat._torch import chunk_cat, set_versions, swap_memory
from fsdp_flat.flat.arrangement import BufferRows, RowTarget, can_chunk, grad_places, split_grad, views_of
from fsdp_flat.flat.params import ManagedParam
from fsdp_flat.layout import FlatLayout, RowLayout

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

    @property
    def nbytes(self) -> int:
        """Number of bytes that the pool keeps."""
        return sum(nbytes * len(idle) for nbytes, idle in self._idle.items())

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate ``nbytes`` for an empty ``storage``; the content is undefined."""
        idle = self._idle.get(nbytes)
        if idle and storage.device.type == "cpu":
            swap_memory(storage, idle[-1])
            self._blank.append(idle.pop())
        else:
            storage.resize_(nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage``."""
        nbytes = storage.nbytes()
        if nbytes == 0:
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
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.tensor.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return self.tensor.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        """Allocate memory from ``pool`` unless it is allocated; the content is undefined."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != self._nbytes:
            pool.fill(storage, self._nbytes)

    def free(self, pool: MemoryPool) -> None:
        """Return the memory to ``pool``."""
        pool.empty(self.tensor.untyped_storage())


class AliasBuffer(FlatBuffer):
    """Aliases the shard of a unit that is not sharded; never freed."""

    def __init__(self, shard: torch.Tensor) -> None:
        self.tensor = shard

    def alloc(self, pool: MemoryPool) -> None:
        pass

    def free(self, pool: MemoryPool) -> None:
        pass


class FlatGradBuffer:
    """Collects the gradients of parameters, and copies them into a flat buffer at once when closed.

    It is closed after the parameters were freed, so that the buffer can reuse their memory. Later gradients are added
    to the buffer.

    Attributes:
        grads_ready: one byte per parameter: 1 where it has a gradient.
        waiting: the gradients that are not in the flat buffer yet, by the parameter's index.
        is_exposed: a caller has views of the buffer, so its memory must not be reused.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = FlatBuffer(layout.numel, dtype, device)
        flat = self._buffer.tensor
        self._layout = layout
        self._places = grad_places(flat, layout)
        # The gradient as a matrix with a row for each rank, if one operation can write it.
        self._rows = flat.view(layout.world_size, -1) if can_chunk(layout) else None
        self._paddings = [flat[interval.to_slice()] for interval in layout.paddings()]
        self.waiting: dict[int, torch.Tensor] = {}
        self.grads_ready = bytearray(len(layout.param_infos))
        self.is_exposed = False
        self._buffer.free(MemoryPool())

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the buffer has this dtype and device."""
        return self._buffer.tensor.dtype == dtype and self._buffer.tensor.device == device

    @property
    def nbytes(self) -> int:
        """Number of bytes of the waiting gradients and of the buffer."""
        return self._buffer.nbytes + sum(grad.nbytes for grad in self.waiting.values())

    def add_grad(self, index: int, grad: torch.Tensor) -> None:
        """Add the gradient of parameter ``index`` (the parameter's shape, any float dtype)."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if not self.grads_ready[index]:
            self.grads_ready[index] = 1
            self.waiting[index] = grad
        elif index in self.waiting:
            self.waiting[index] = torch.add(self.waiting[index].to(self._buffer.tensor.dtype), grad)
        else:
            for place, piece in zip(self._places[index], split_grad(grad, self._layout, index), strict=True):
                place.add_(piece)

    def clear(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Fill the gradients of parameters with zeros, or drop them."""
        for index in indices:
            waiting = self.waiting.pop(index, None)
            if waiting is None and self._buffer.nbytes:
                torch._foreach_zero_(self._places[index])
            if set_to_none:
                self.grads_ready[index] = 0
            elif waiting is not None:
                self.waiting[index] = torch.zeros_like(waiting)  # autograd may hold the tensor too

    def close(self, pool: MemoryPool) -> torch.Tensor:
        """Return the complete flat gradient: zero in the padding and for parameters without a gradient."""
        if self._buffer.nbytes == 0:
            self._buffer.alloc(pool)
            if self._rows is not None and len(self.waiting) == len(self._places):
                grads = [self.waiting[index] for index in range(len(self._places))]
                if {grad.dtype for grad in grads} == {self._rows.dtype}:  # it converts slowly
                    chunk_cat(grads, 0, self._layout.world_size, out=self._rows)
                    self.waiting.clear()
                    return self._buffer.tensor
            for padding in self._paddings:
                padding.zero_()
            for places, there in zip(self._places, self.grads_ready, strict=True):
                if not there:
                    torch._foreach_zero_(places)
        if self.waiting:
            torch._foreach_copy_(
                [place for index in self.waiting for place in self._places[index]],
                [piece for index, grad in self.waiting.items() for piece in split_grad(grad, self._layout, index)],
            )
            self.waiting.clear()
        return self._buffer.tensor

    def release(self, pool: MemoryPool) -> None:
        """Drop all gradients and return the memory to ``pool``; no views of the buffer may be in use."""
        self._buffer.free(pool)
        self.grads_ready = bytearray(len(self._places))


_EXPIRED = 10**9
"""Offset of the versions that autograd reports while a parameter is sharded; README's limits name the number."""


class UnshardedParams:
    """Holds the unsharded parameters of one compute dtype, and the buffer that they view.

    While the buffer does not hold their values, the parameters are marked as changed: autograd, which compares versions
    whenever it unpacks a saved tensor, then raises. A backward unshards a unit when it reaches one of the outputs that
    were found. A tensor that a module stored elsewhere may be reached earlier, and would read freed memory.

    Args:
        shard: the handle's shard, which becomes the buffer if it holds the same values.
        dtype, device: those of compute.

    Attributes:
        params: one Parameter per managed one, which modules see in compute; each has a version counter of its own.
        rows: places shards of ranks in the buffer, for a row layout over several ranks; else None.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        layout: FlatLayout,
        rank: int,
        shard: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        is_shard = layout.world_size == 1 and dtype == shard.dtype and device == shard.device
        self.buffer = AliasBuffer(shard) if is_shard else FlatBuffer(layout.numel, dtype, device)
        flat = self.buffer.tensor
        self.rows = BufferRows(flat, layout) if isinstance(layout, RowLayout) and layout.world_size > 1 else None
        self._own_slice = flat[layout.shard(rank).to_slice()]
        params = []
        for entry, view in zip(managed, views_of(flat, layout), strict=True):
            # ``.data`` gives the parameter a separate version counter, which refills of the buffer do not change.
            param = nn.Parameter(entry.adapter.from_local(view.data), requires_grad=False)
            # Attributes that a forward reads from parameters (weight decay flags, parallel dims) stay readable.
            param.__dict__.update(entry.param.__dict__)
            params.append(param)
        self.params = tuple(params)
        self._versions: tuple[int, ...] | None = None
        self.free(MemoryPool())

    def load(self, shard: torch.Tensor, pool: MemoryPool) -> tuple[torch.Tensor, RowTarget | None]:
        """Allocate the buffer, and return the input of its all-gather.

        It is the buffer, with the rank's shard in place, and None; or the shard in the compute dtype, and the target
        of the shards of all ranks.
        """
        buffer = self.buffer
        buffer.alloc(pool)
        if shard.device != buffer.tensor.device:
            # Copy in the shard's dtype first: a converting copy between devices would block the host.
            shard = shard.to(buffer.tensor.device, non_blocking=True)
        if self.rows is not None:
            dtype = buffer.tensor.dtype
            return shard if shard.dtype == dtype else shard.to(dtype), self.rows
        if not isinstance(buffer, AliasBuffer):
            self._own_slice.copy_(shard)
        return buffer.tensor, None

    def free(self, pool: MemoryPool) -> None:
        """Return the memory to ``pool``; from now on autograd refuses what it saved of the parameters."""
        # Where nothing is freed, nothing can be used too late.
        if self._versions is None and not isinstance(self.buffer, AliasBuffer):
            self._versions = tuple([param._version for param in self.params])
            set_versions(self.params, tuple([version + _EXPIRED for version in self._versions]))
        self.buffer.free(pool)

    def mark_filled(self) -> None:
        """Have autograd accept the parameters again: the buffer has their values."""
        if self._versions is not None:
            set_versions(self.params, self._versions)
            self._versions = None
