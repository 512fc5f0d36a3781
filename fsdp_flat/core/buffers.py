"""Manages the memory of flat buffers, in which unsharded parameters and gradients are."""

from __future__ import annotations

import torch

from fsdp_flat.comm import Allocate
from fsdp_flat.core.torch_core import swap_memory

# Largest number of freed blocks of one size that the pool keeps.
_MOST_IDLE = 2
# torch's memory trackers replace it, and see no other way in which memory leaves a storage.
_RESIZE = torch.UntypedStorage.resize_


class MemoryPool:
    """Keeps a few freed blocks of CPU memory, so that the next buffer does not page-fault.

    The memory moves from one storage object to another: a view of a freed buffer, which autograd may hold, keeps an
    empty storage and never sees the data of another unit. Accelerators have caching allocators, so the pool keeps
    nothing for them, nor if torch cannot move memory between storages, nor while a memory tracker of torch is on.

    Attributes:
        idle: the freed blocks, by their number of bytes.
        blank: storage objects without memory.
    """

    def __init__(self) -> None:
        self.idle: dict[int, list[torch.UntypedStorage]] = {}
        self.blank: list[torch.UntypedStorage] = []

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage``, unless a numpy array uses it too."""
        nbytes = storage.nbytes()
        # A numpy array that a caller has made of a view points to memory that torch marks as not resizable.
        if nbytes == 0 or not storage.resizable():
            return
        idle = self.idle.setdefault(nbytes, [])
        is_tracked = torch.UntypedStorage.resize_ is not _RESIZE
        if swap_memory is None or is_tracked or storage.device.type != "cpu" or len(idle) >= _MOST_IDLE:
            storage.resize_(0)
            return
        block = self.blank.pop() if self.blank else torch.UntypedStorage(0)
        swap_memory(block, storage)
        idle.append(block)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape, dtype and device of ``tensor`` and undefined content."""
        idle = self.idle.get(tensor.nbytes)
        if not idle or tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        fresh = torch.empty(0, dtype=tensor.dtype)
        return fresh.set_(idle.pop(), 0, tensor.shape)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Return all memory of the pool to the system."""
        self.idle.clear()


class FlatBuffer:
    """Holds a 1-D tensor whose memory a pool can take (``MemoryPool.empty``) while views of it exist, and give again.

    Autograd saves views of unsharded parameters. The storage object therefore stays and is resized to zero; once the
    same values are all-gathered again, all saved views are valid.

    Args:
        tensor: the 1-D tensor, allocated.
        owns_memory: False for the shard of a unit that is not sharded, which is its own buffer and is never freed.
    """

    def __init__(self, tensor: torch.Tensor, *, owns_memory: bool = True) -> None:
        self.tensor, self.owns_memory = tensor, owns_memory
        self._nbytes = tensor.untyped_storage().nbytes()

    @property
    def full_nbytes(self) -> int:
        """Number of bytes that a free gives back; 0 for a buffer that is the shard."""
        return self._nbytes if self.owns_memory else 0

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return self.tensor.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool, memory: Allocate | None = None) -> bool:
        """Allocate memory (undefined content) from ``pool``, or by ``memory``; return False if there is memory already.

        What ``memory`` allocates becomes the buffer's, which a free gives back to it.
        """
        storage, nbytes = self.tensor.untyped_storage(), self._nbytes
        if not self.owns_memory or storage.nbytes() == nbytes:
            return False
        idle = pool.idle.get(nbytes)
        if memory is not None:
            fresh = memory(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)
            swap_memory(storage, fresh.untyped_storage())
        elif idle and storage.device.type == "cpu":
            swap_memory(storage, idle[-1])
            pool.blank.append(idle.pop())
        else:
            storage.resize_(nbytes)
        return True

    def take_memory(self) -> torch.UntypedStorage | None:
        """Return the memory in another storage, as if it was freed; None if it cannot be moved there, or is freed."""
        storage = self.tensor.untyped_storage()
        # What a numpy array uses too stays where it is, and is never freed.
        if swap_memory is None or not self.owns_memory or storage.nbytes() == 0 or not storage.resizable():
            return None
        block = torch.UntypedStorage(0, device=storage.device)
        swap_memory(block, storage)
        return block
