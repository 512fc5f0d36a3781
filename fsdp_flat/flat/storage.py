"""Manages the memory of flat buffers: the buffer of unsharded parameters, and the pool for all buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_flat.flat._torch import set_versions, swap_memory

__all__ = ["EXPIRED", "AliasBuffer", "DtypeBuffer", "Expiry", "FlatBuffer", "MemoryPool"]

_MOST_IDLE = 2


class MemoryPool:
    """Keeps a few freed blocks of CPU memory, so that the next buffer does not page-fault.

    The memory moves from one storage object to another: a view of a freed buffer, which autograd may hold, keeps an
    empty storage and never sees the data of another unit. Accelerators have caching allocators, so the pool keeps
    nothing for them, nor if torch cannot move memory between storages.
    """

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.UntypedStorage]] = {}

    @property
    def nbytes(self) -> int:
        """Number of bytes that the pool keeps."""
        return sum(nbytes * len(idle) for nbytes, idle in self._idle.items())

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate ``nbytes`` for an empty ``storage``; the content is undefined."""
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
    same values are all-gathered again, all saved views are valid. Views that are parameters have separate version
    counters, which a refill does not change.

    Args:
        numel: elements of the full buffer.
        dtype: compute dtype.
        device: compute device.
    """

    __slots__ = ("_nbytes", "tensor")

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

    __slots__ = ()

    def __init__(self, shard: torch.Tensor) -> None:
        self.tensor = shard
        self._nbytes = shard.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        pass

    def free(self, pool: MemoryPool) -> None:
        pass


EXPIRED = 10**9
"""Offset of the versions that autograd reports while a parameter is sharded; README's limits name the number."""


class Expiry:
    """Marks the unsharded parameters of one buffer as changed while the buffer does not hold their values.

    A backward unshards a unit when it reaches one of the outputs that were found. Autograd may reach a tensor that a
    module stored elsewhere earlier, and its graph uses the parameters too: it would read freed memory, or memory that
    an all-gather still writes to. Autograd compares versions whenever it unpacks a saved tensor and raises if they
    differ, so another version in between costs nothing where it is read.

    Args:
        unsharded_params: the parameters that modules see; each has a version counter of its own.
    """

    __slots__ = ("_params", "_versions")

    def __init__(self, unsharded_params: Sequence[torch.Tensor]) -> None:
        self._params = tuple(unsharded_params)
        self._versions: tuple[int, ...] | None = None

    def expire(self) -> None:
        """Have autograd refuse what it saved of the parameters from now on."""
        if self._versions is None and self._params:
            self._versions = tuple([unsharded_param._version for unsharded_param in self._params])
            set_versions(self._params, tuple([version + EXPIRED for version in self._versions]))

    def renew(self) -> None:
        """Have autograd accept it again: the parameters have their values."""
        if self._versions is not None:
            set_versions(self._params, self._versions)
            self._versions = None


@dataclass(frozen=True, slots=True)
class DtypeBuffer:
    """Groups an unsharded buffer of one compute dtype, this rank's slice and the parameters that view it."""

    buffer: FlatBuffer
    own_slice: torch.Tensor
    unsharded_params: tuple[nn.Parameter, ...]
    expiry: Expiry
