"""Supports all-gathers and reduce-scatters that a caller supplies in place of the library's.

Two of these are in 8-bit integers, a quarter of fp32's bytes, for slow networks. A tensor is split into blocks; each is
sent as the integers ``round(x * 127 / largest)`` and one fp32 scale, the largest magnitude of the block. Rounding
changes an element by at most ``largest / 254``: once in an all-gather, once per rank in a reduce-scatter, which sums in
fp32. (Blockwise quantization of all-gathered weights and of an all-to-all of gradients: ZeRO++, arXiv 2306.10209.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm import _torch
from fsdp_flat.comm.flat_collectives import (
    Collectives,
    EmptyLike,
    Pending,
    PlaceRows,
    begin_staged_all_gather,
    collectives_for,
    own_slice,
)
from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.errors import OptionError, UnsupportedError

_SCALE_NBYTES = 4
# 127 divided by it is still finite in fp32.
_SMALLEST = 1e-36


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


class Allocate(Protocol):
    """Describes a function that allocates memory for communication, such as ``allocate`` of FSDP2's objects."""

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of this size that no collective in flight uses; a unit may have two in flight."""
        ...


@dataclass(frozen=True, slots=True)
class CollectiveChoice:
    """Holds the parts of a unit's collectives that a caller has replaced.

    Attributes:
        all_gather: the caller's all-gather; None keeps the library's.
        reduce_scatter: the caller's reduce-scatter; None keeps the library's.
        gather_memory: allocates the outputs of all-gathers, which are copied from there; None uses the unit's buffers.
        reduce_memory: allocates the inputs and outputs of reduce-scatters; None uses the unit's buffers.
        reduce_group: group of the shard group's ranks for reduce-scatters; None uses the shard group.
        backend: the library's are the backend's, also where others are cheaper.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    gather_memory: Allocate | None = None
    reduce_memory: Allocate | None = None
    reduce_group: RankGroup | None = None
    backend: bool = False


def chosen_collectives(
    choice: CollectiveChoice, rank_group: RankGroup, device: torch.device, *, unit: int, name: str
) -> Collectives | None:
    """Return collectives of a group with the parts that a caller has replaced; None for a single rank.

    Args:
        choice: the replaced parts.
        rank_group: the ranks.
        device: the compute device.
        unit: as for :func:`collectives_for`.
        name: likewise.
    """
    own = collectives_for(rank_group, device, unit=unit, name=name, backend=choice.backend)
    if own is None or choice == CollectiveChoice(backend=choice.backend):
        return own
    reductions: Collectives | None = own
    if choice.reduce_group is not None:
        reductions = collectives_for(choice.reduce_group, device, unit=unit, name=name, backend=choice.backend)
    assert reductions is not None
    return CustomCollectives(rank_group, own, reductions, choice)


class CustomCollectives:
    """Replaces parts of the library's collectives by a caller's.

    Args:
        rank_group: the shard group, of more than one rank.
        own: the library's collectives for the group.
        own_reductions: those for reduce-scatters, over ``choice.reduce_group`` if there is one.
        choice: the replaced parts.
    """

    def __init__(
        self, rank_group: RankGroup, own: Collectives, own_reductions: Collectives, choice: CollectiveChoice
    ) -> None:
        self._rank_group = rank_group
        self._reduce_group = choice.reduce_group or rank_group
        self._own = own
        self._own_reductions = own_reductions
        self._choice = choice

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        """Implement :class:`Collectives`."""
        if not self._replaces_gather_of(full):
            return self._own.begin_all_gather(full)
        memory = self._choice.gather_memory
        if memory is None:
            return self._begin_gather(full)
        staging = memory((full.numel(),), dtype=full.dtype, device=full.device)
        own_slice(staging, self._rank_group).copy_(own_slice(full, self._rank_group))
        pending = self._begin_gather(staging)

        def finish() -> torch.Tensor:
            with torch.no_grad():
                return full.copy_(pending.wait())

        return Pending([pending], full, finish, alive=(staging,))

    def begin_all_gather_rows(self, own: torch.Tensor, place: PlaceRows) -> Pending:
        """Implement :class:`Collectives`."""
        if not self._replaces_gather_of(own):
            return self._own.begin_all_gather_rows(own, place)
        memory, numel = self._choice.gather_memory, self._rank_group.size * own.numel()
        staging = None if memory is None else memory((numel,), dtype=own.dtype, device=own.device)
        return begin_staged_all_gather(self._begin_gather, self._rank_group, own, place, staging)

    def _replaces_gather_of(self, tensor: torch.Tensor) -> bool:
        # Quantized all-gathers are for floats; integer parameters use the library's all-gather.
        return self._choice.all_gather is not None and tensor.is_floating_point()

    def _begin_gather(self, full: torch.Tensor) -> Pending:
        assert self._choice.all_gather is not None
        assert self._rank_group.group is not None
        own = own_slice(full, self._rank_group)
        work = self._choice.all_gather(full, own, self._rank_group.group, async_op=True)
        return Pending([work], full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        """Implement :class:`Collectives`."""
        if self._choice.reduce_scatter is None:
            return self._own_reductions.begin_reduce_scatter(full, empty_like)
        numel, memory = full.numel() // self._rank_group.size, self._choice.reduce_memory
        if memory is None:
            out = full.new_empty(numel)
        else:
            full = memory((full.numel(),), dtype=full.dtype, device=full.device).copy_(full)
            out = memory((numel,), dtype=full.dtype, device=full.device)
        assert self._reduce_group.group is not None
        work = self._choice.reduce_scatter(out, full, self._reduce_group.group, dist.ReduceOp.SUM, async_op=True)
        # The result becomes a gradient, which outlives memory of the caller.
        return Pending([work], out, None if memory is None else out.clone, alive=(full,))


def backend_all_gather(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Work | None:
    """Implement :class:`AllGather` by the backend's own."""
    work: Work | None = _torch.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
    return work


def backend_reduce_scatter(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
) -> Work | None:
    """Implement :class:`ReduceScatter` by the backend's own."""
    work: Work | None = _torch.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
    return work


def memory_of_group(group: dist.ProcessGroup, device: torch.device) -> Allocate:
    """Return the allocator of a group's backend.

    Raises:
        UnsupportedError: the backend has none.
    """
    allocate_tensor = _torch.tensor_allocator(group, device)
    if allocate_tensor is None:
        raise UnsupportedError(
            f"The backend {dist.get_backend(group)!r} cannot allocate memory for communication on {device} "
            "(supports_tensor_alloc is False). Leave the units' own buffers in use, or pass objects with an allocate "
            "of your own to set_custom_all_gather and set_custom_reduce_scatter."
        )

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return allocate_tensor(math.prod(size), dtype=dtype, device=device)

    return allocate


class _Blocks:
    """Packs rows of floats into rows of bytes: the integers, then the scales.

    Args:
        block: elements that share a scale.
    """

    def __init__(self, block: int) -> None:
        if block < 1:
            raise OptionError(f"block is a number of elements of at least 1, got {block}")
        self.block = block

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes of a packed row of ``numel`` elements."""
        return self._num_blocks(numel) * (self.block + _SCALE_NBYTES)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Pack (rows, numel) of any float dtype into (rows, nbytes) of uint8."""
        num_rows, numel = rows.shape
        blocks = self._num_blocks(numel)
        padded = torch.zeros(num_rows, blocks * self.block, dtype=torch.float32, device=rows.device)
        padded[:, :numel] = rows
        cut = padded.view(num_rows, blocks, self.block)
        largest = cut.abs().amax(dim=2, keepdim=True)
        # A block of zeros stays zero; infinities and NaNs make the whole block NaN, so that they are detected.
        integers = torch.nan_to_num(cut.mul_(127 / largest.clamp(min=_SMALLEST))).round_()
        packed = torch.empty(num_rows, self.nbytes(numel), dtype=torch.uint8, device=rows.device)
        packed[:, : blocks * self.block] = integers.to(torch.int8).view(num_rows, -1).view(torch.uint8)
        packed[:, blocks * self.block :] = largest.view(num_rows, blocks).view(torch.uint8)
        return packed

    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        """Invert :meth:`pack`, to fp32."""
        num_rows, blocks = packed.shape[0], self._num_blocks(numel)
        integers = packed[:, : blocks * self.block].view(torch.int8).view(num_rows, blocks, self.block)
        largest = packed[:, blocks * self.block :].contiguous().view(torch.float32).view(num_rows, blocks, 1)
        values = integers.to(torch.float32).mul_(largest / 127)
        return values.view(num_rows, -1)[:, :numel]


class _Quantized:
    """Holds the block format that both collectives share."""

    def __init__(self, block: int = 256) -> None:
        self._blocks = _Blocks(block)


class QuantizedAllGather(_Quantized):
    """Implements :class:`AllGather` in 8-bit integers. All ranks use the same rounded values, also for their own slice.

    Args:
        block: elements that share a scale.

    Raises:
        OptionError: if ``block`` is below 1.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        """Implement :class:`AllGather`."""
        size, numel = dist.get_world_size(group), input_tensor.numel()
        own = self._blocks.pack(input_tensor.view(1, -1))
        everyone = own.new_empty(size, own.shape[1])
        work = _torch.all_gather_single(everyone.view(-1), own.view(-1), group=group, async_op=True)

        def finish() -> torch.Tensor:
            with torch.no_grad():
                output_tensor.view(size, numel).copy_(self._blocks.unpack(everyone, numel))
            return output_tensor

        return _started(Pending([work], output_tensor, finish), async_op)


class QuantizedReduceScatter(_Quantized):
    """Implements :class:`ReduceScatter` in 8-bit integers, summed in fp32.

    Args:
        block: elements that share a scale.

    Raises:
        OptionError: if ``block`` is below 1.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Pending | None:
        """Implement :class:`ReduceScatter`.

        Raises:
            OptionError: if ``op`` is not ``ReduceOp.SUM``.
        """
        if op != dist.ReduceOp.SUM:
            raise OptionError(f"QuantizedReduceScatter sums; got op={op}. Divide afterwards.")
        size, numel = dist.get_world_size(group), output_tensor.numel()
        sent = self._blocks.pack(input_tensor.view(size, numel))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)

        def finish() -> torch.Tensor:
            with torch.no_grad():
                return output_tensor.copy_(self._blocks.unpack(received, numel).sum(0))

        return _started(Pending([work], output_tensor, finish), async_op)


def _started(work: Pending, async_op: bool) -> Pending | None:
    if async_op:
        return work
    work.wait()
    return None
