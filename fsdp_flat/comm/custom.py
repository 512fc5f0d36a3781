"""Supports all-gathers and reduce-scatters that a caller supplies in place of the library's."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm.flat_collectives import Collectives, EmptyLike, Pending, own_slice
from fsdp_flat.comm.rank_groups import RankGroup

__all__ = ["AllGather", "CustomCollectives", "ReduceScatter", "Work"]


class Work(Protocol):
    """Describes the handle of a caller's asynchronous collective, such as ``torch.distributed.Work``."""

    def wait(self) -> Any:
        """Block until the output is ready (on an accelerator: until the current stream may use it)."""
        ...

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once; False if unknown."""
        ...


class AllGather(Protocol):
    """Describes an all-gather of shards, with the signature of torch's ``fully_shard`` interface of this name."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Begin to fill ``output_tensor`` with every rank's ``input_tensor``, in rank order.

        Args:
            output_tensor: 1-D, the full buffer, in the compute dtype.
            input_tensor: 1-D, this rank's slice, a view of ``output_tensor``.
            group: the shard group.
            async_op: always True.

        Returns:
            The work, for example torch's, or None if the output is ready.
        """
        ...


class ReduceScatter(Protocol):
    """Describes a reduce-scatter of gradients, with the signature of torch's ``fully_shard`` interface of this name."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Begin to fill ``output_tensor`` with this rank's slice of the sum of every rank's ``input_tensor``.

        Args:
            output_tensor: 1-D, one slice.
            input_tensor: 1-D, the full gradient in the reduce dtype; it may be overwritten.
            group: the shard group.
            op: always ``ReduceOp.SUM``; the library divides afterwards.
            async_op: always True.

        Returns:
            The work, for example torch's, or None if the output is ready.
        """
        ...


class CustomCollectives:
    """Replaces the library's all-gather, reduce-scatter or both by a caller's.

    Args:
        rank_group: the shard group, of more than one rank.
        own: the library's collectives for the group.
        all_gather: the caller's all-gather; None keeps the library's.
        reduce_scatter: the caller's reduce-scatter; None keeps the library's.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        own: Collectives,
        all_gather: AllGather | None,
        reduce_scatter: ReduceScatter | None,
    ) -> None:
        self._rank_group = rank_group
        self._own = own
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter

    def name_units(self, names: dict[int, str]) -> None:
        """Implement :class:`Collectives`."""
        self._own.name_units(names)

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        """Implement :class:`Collectives`."""
        # Quantized all-gathers are for floats; integer parameters use the library's all-gather.
        if self._all_gather is None or not full.is_floating_point():
            return self._own.begin_all_gather(full)
        assert self._rank_group.group is not None
        work = self._all_gather(full, own_slice(full, self._rank_group), self._rank_group.group, async_op=True)
        return Pending([work], full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        """Implement :class:`Collectives`."""
        if self._reduce_scatter is None:
            return self._own.begin_reduce_scatter(full, empty_like)
        out = full.new_empty(full.numel() // self._rank_group.size)
        assert self._rank_group.group is not None
        work = self._reduce_scatter(out, full, self._rank_group.group, dist.ReduceOp.SUM, async_op=True)
        return Pending([work], out, alive=(full,))
