"""Holds what all-gathers fill: the unsharded parameters of a group in one compute dtype, and their memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_flat.comm import Allocate, is_accelerator
from fsdp_flat.core.buffers import FlatBuffer, MemoryPool
from fsdp_flat.core.gather_targets import GatherTarget, GroupedTarget, PerParamTarget
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.layout import Layout
from fsdp_flat.core.params import PLAIN, ManagedParam
from fsdp_flat.core.torch_core import VERSION_OF, set_versions

# Added to version counters while parameters are freed, so that autograd refuses what it saved.
# docs/differences.md names the number.
EXPIRED = 10**9


class AllGatherOutput(ABC):
    """Holds the unsharded parameters in one compute dtype, sends this rank's shards, and takes those of all ranks.

    While the memory is freed, the parameters are marked as changed: autograd, which compares versions whenever it
    unpacks a saved tensor, then raises. Otherwise a backward from a tensor that a module stored, which passes no
    hooked output and so unshards nothing, would read freed memory.

    Attributes:
        params: one Parameter per managed parameter, for modules to compute with; each has its own version counter.
        plain: the ``params`` that are plain tensors, views of the first of ``tensors``.
        storages: for each of ``params`` the identity of its storage, if it is in ``plain``; else None.
        tensors: the tensors that have the memory; none until the first all-gather, if that makes them.
        owns_memory: False for the shard of a unit that is not sharded, which is its own buffer and is never freed.
        target: places the rows of ranks where the all-gather does not write itself; None if it is in place.
        versions_when_filled: version counters when the memory was filled, if a change since then can be compared with
            the shard; else None.
    """

    owns_memory = True
    target: PerParamTarget | None = None
    versions_when_filled: tuple[int, ...] | None = None

    def __init__(self, params: Sequence[nn.Parameter], memory: Sequence[FlatBuffer]) -> None:
        self.params = tuple(params)
        self.plain: list[nn.Parameter] = []
        self.storages: list[int | None] = [None] * len(params)
        self._versions_before_free: tuple[int, ...] | None = None  # None while the memory is filled
        self._hold(memory)

    def _hold(self, memory: Sequence[FlatBuffer]) -> None:
        self._memory, self.tensors = memory, [buffer.tensor for buffer in memory]

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return sum(buffer.nbytes for buffer in self._memory)

    @property
    def full_nbytes(self) -> int:
        """Number of bytes that a free gives back; 0 if the shard is the buffer, or the memory is not made yet."""
        return sum(buffer.full_nbytes for buffer in self._memory)

    def gathered_nbytes(self) -> int:
        """Return the number of bytes of the unsharded parameters, also before the first all-gather."""
        return self.full_nbytes

    def alloc(self, pool: MemoryPool) -> None:
        """Allocate the memory (undefined content), unless it is there."""
        for buffer in self._memory:
            buffer.alloc(pool)

    @abstractmethod
    def send(self, pool: MemoryPool, memory: Allocate | None = None) -> tuple[torch.Tensor, GatherTarget | None]:
        """Return the arguments of the all-gather.

        In place: the buffer, by ``memory`` if given, which contains this rank's shard, and None. Else: this rank's row
        (1-D), whose dtype may not be that of ``target`` yet, and ``target``. The memory is allocated, except on
        accelerators for ``target``: there :meth:`alloc` does when the all-gather has ended.
        """

    def send_kept(self, rows: torch.Tensor, pool: MemoryPool) -> tuple[torch.Tensor, GatherTarget]:
        """Return the arguments of an all-gather of ``rows`` that :meth:`keep` returned, as :meth:`send` does."""
        assert self.target is not None
        if not is_accelerator(rows.device):
            self.alloc(pool)
        return rows, GroupedTarget(self.target, rows.numel() // self.target.row_numel)

    def keep(self, ranks: range) -> torch.Tensor:
        """Return a copy (1-D) of the rows of ``ranks`` (consecutive), for an all-gather over a smaller group."""
        assert self.target is not None
        return self.target.rows_of(ranks)

    @abstractmethod
    def arrived(self) -> bool:
        """Restore version counters, so that autograd accepts saved parameters again: the memory is filled.

        Returns:
            Whether ``params`` are other objects than before.
        """

    def free(self, pool: MemoryPool) -> None:
        """Free the memory, and raise version counters, so that autograd refuses parameters that it saved."""
        if not self.owns_memory:
            return  # a buffer that is the shard is never freed, so that saved parameters stay valid
        if self._versions_before_free is None:
            self._versions_before_free = tuple(map(VERSION_OF, self.params))
            set_versions(self.params, tuple(map(EXPIRED.__add__, self._versions_before_free)))
        for buffer in self._memory:
            pool.empty(buffer.tensor.untyped_storage())

    def take_memory(self) -> torch.UntypedStorage | None:
        """Return memory that an all-gather in flight writes to, as if it was freed; None if there is none."""
        return None


class FlatOutput(AllGatherOutput):
    """Is one buffer in the order of ``layout``, with views of it: filled in place, or from staging by ``target``.

    Args:
        managed: the parameters, in the order of ``layout``.
        flat_param: the shards, whose data become the buffer if these are the same values.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        layout: Layout,
        spec: ParamGroupSpec,
        flat_param: nn.Parameter,
        dtype: torch.dtype,
    ) -> None:
        shard, device = flat_param.data, spec.device
        self.owns_memory = layout.world_size > 1 or dtype != shard.dtype or device != shard.device
        flat = torch.empty(layout.numel, dtype=dtype, device=device) if self.owns_memory else shard
        self._buffer, self._flat_param = FlatBuffer(flat, owns_memory=self.owns_memory), flat_param
        # ``.data`` gives a parameter a separate version counter, which refills of the buffer do not change.
        views = zip(managed, layout.views(flat), strict=True)
        super().__init__([entry.unsharded(view.data) for entry, view in views], [self._buffer])
        for index, (entry, param) in enumerate(zip(managed, self.params, strict=True)):
            if entry.adapter is PLAIN:
                self.plain.append(param)
                self.storages[index] = param.untyped_storage()._cdata
        self.target, self._is_on_accelerator = layout.gather_target(flat), is_accelerator(device)
        self._own_slice = flat[layout.shard(spec.rank).to_slice()]

    def send(self, pool: MemoryPool, memory: Allocate | None = None) -> tuple[torch.Tensor, GatherTarget | None]:
        buffer, shard = self._buffer.tensor, self._flat_param.data
        if self.target is None or not self._is_on_accelerator:
            self._buffer.alloc(pool, memory if self.target is None else None)
        if shard.device != buffer.device:
            # Copy in the shard's dtype first: a converting copy between devices would block the host.
            shard = shard.to(buffer.device, non_blocking=True)
        if self.target is not None:
            return shard if self.target.dtype is not None else shard.to(buffer.dtype), self.target
        if self.owns_memory:
            self._own_slice.copy_(shard)
        return buffer, None

    def arrived(self) -> bool:
        if self._versions_before_free is not None:
            set_versions(self.params, self._versions_before_free)
            self._versions_before_free = None
        if self.owns_memory:
            self.versions_when_filled = tuple(map(VERSION_OF, self.params))
        return False

    def take_memory(self) -> torch.UntypedStorage | None:
        return self._buffer.take_memory()
