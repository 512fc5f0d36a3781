"""Storage of gathered parameters: one storage object for life, whose memory comes and goes."""

from __future__ import annotations

import torch

from fsdp_flat.flat.pool import MemoryPool

__all__ = ["AliasBuffer", "FlatBuffer"]


class FlatBuffer:
    """A 1-D tensor that can be freed and filled again under the views that were made of it.

    Autograd saves views of gathered parameters. The storage object therefore stays and is resized to
    zero; when the same values are gathered again, everything saved is valid again. Views that are
    parameters have version counters of their own, which a refill does not touch.

    Args:
        numel: elements of the whole buffer.
        dtype: dtype of compute.
        device: device of compute.
    """

    __slots__ = ("_nbytes", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.tensor.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self.tensor.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        """Make sure that there is memory, from ``pool``; the content is undefined until it is filled."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != self._nbytes:
            pool.fill(storage, self._nbytes)

    def free(self, pool: MemoryPool) -> None:
        """Give the memory back to ``pool``."""
        pool.empty(self.tensor.untyped_storage())


class AliasBuffer(FlatBuffer):
    """The buffer of a unit that is not sharded: the shard itself, never freed."""

    __slots__ = ()

    def __init__(self, shard: torch.Tensor) -> None:
        self.tensor = shard
        self._nbytes = shard.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        pass

    def free(self, pool: MemoryPool) -> None:
        pass
