"""Memory of freed buffers, kept for the next buffer of the same size."""

from __future__ import annotations

import torch

from fsdp_flat.flat._torch import swap_memory

__all__ = ["MemoryPool"]

_MOST_IDLE = 2


class MemoryPool:
    """A few freed blocks of CPU memory, so that the next buffer is not filled through page faults.

    What moves is the memory, from one storage object to another: a view of a freed buffer, which autograd
    may hold, is left with a storage of no bytes and can never see what another unit puts there. Accelerators
    have caching allocators, so nothing is kept there, nor where torch cannot move memory.
    """

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.UntypedStorage]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return sum(nbytes * len(idle) for nbytes, idle in self._idle.items())

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give an empty ``storage`` memory; the content is undefined."""
        idle = self._idle.get(nbytes)
        if idle and storage.device.type == "cpu":
            swap_memory(storage, idle.pop())
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
        kept = torch.UntypedStorage(0)
        swap_memory(kept, storage)
        idle.append(kept)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape, dtype and device of ``tensor``, whose content is undefined."""
        idle = self._idle.get(tensor.nbytes)
        if not idle or tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        fresh = torch.empty(0, dtype=tensor.dtype)
        return fresh.set_(idle.pop(), 0, tensor.shape)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Give everything that is kept back to the system."""
        self._idle.clear()
