"""Describes the collectives that a caller may supply in place of the library's, and implements two of them.

These are in 8-bit integers or bf16, a quarter or half of fp32's bytes, for slow networks; the library's own may use
such rows between hosts (``PACKINGS``). For integers a tensor is split into blocks; each is sent as the integers
``round(x * 127 / largest)`` and one fp32 scale, the largest magnitude of the block. Rounding changes an element by at
most ``largest / 254``: once in an all-gather, once per rank in a reduce-scatter, which sums in fp32.
(Blockwise quantization of all-gathered weights and of an all-to-all of gradients: ZeRO++, arXiv 2306.10209.)
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm import torch_comm
from fsdp_flat.comm.given_up import Pending
from fsdp_flat.errors import OptionError

_logger = logging.getLogger("fsdp_flat")

# 127 divided by it is still finite in fp32.
_SMALLEST = 1e-36


# Allocates memory for communication that no collective in flight uses, by ``(size, *, dtype, device)``; such as
# ``allocate`` of FSDP2's objects. A unit may have two in flight.
Allocate = Callable[..., torch.Tensor]


class AllGather(Protocol):
    """Describes an all-gather of shards, with the signature of torch's ``fully_shard`` interface of this name."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Begin to fill ``output_tensor`` with every rank's ``input_tensor``, in rank order.

        Args:
            output_tensor: 1-D, the full buffer, in the compute dtype. Its memory is freed after use.
            input_tensor: 1-D, this rank's slice, a view of ``output_tensor``.
            group: the shard group.
            async_op: always True.

        Returns:
            The work, with ``wait`` and ``is_completed`` (False if unknown), or None if the output is ready.
        """


class ReduceScatter(Protocol):
    """Describes a reduce-scatter of gradients, with the signature of torch's ``fully_shard`` interface of this name."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Begin to fill ``output_tensor`` with this rank's slice of the sum of every rank's ``input_tensor``.

        Args:
            output_tensor: 1-D, one slice.
            input_tensor: 1-D, the full gradient in the reduce dtype; it may be overwritten.
            group: the shard group.
            op: always ``ReduceOp.SUM``; the library divides afterwards.
            async_op: always True.

        Returns:
            The work, with ``wait`` and ``is_completed`` (False if unknown), or None if the output is ready.
        """


@functools.cache
def warn_once(text: str) -> None:
    """Write a line to the log, once however many units it is true of."""
    _logger.warning("%s", text)


def memory_of_group(group: dist.ProcessGroup, device: torch.device) -> Allocate | None:
    """Return the allocator of a group's backend; None, with a line in the log, if the backend has none."""
    allocate_tensor = torch_comm.tensor_allocator(group, device)
    if allocate_tensor is None:
        warn_once(
            f"The backend {dist.get_backend(group)!r} cannot allocate memory for communication on {device} "
            "(supports_tensor_alloc is False): buffers stay in ordinary memory."
        )
        return None
    return lambda size, **kwargs: allocate_tensor(math.prod(size), **kwargs)


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str) -> Allocate | None:
    """Return an allocator of symmetric memory of a group; None, with a line in the log, if there is none.

    Every rank of the group must call this.
    """
    try:
        return torch_comm.symmetric_allocator(group, device, backend)
    except (ImportError, RuntimeError) as error:
        warn_once(f"Buffers stay in ordinary memory, not in symmetric memory of {backend}: {error}")
        return None


class Packing(Protocol):
    """Describes a way to send rows of floats in fewer bytes."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Pack (rows, numel) of any float dtype into (rows, nbytes) of uint8."""

    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the fp32 values (rows, numel) of packed rows."""


class _Bfloat16:
    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.bfloat16().view(torch.uint8)

    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        return packed.view(torch.bfloat16).float()


class _Quantized:
    """Packs rows of floats into rows of bytes: the integers of all blocks, then their scales."""

    def __init__(self, block: int = 256) -> None:
        if block < 1:
            raise OptionError(f"block is a number of elements of at least 1, got {block}")
        self._block = block

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % self._block))
        cut = padded.view(len(rows), -1, self._block)
        largest = cut.abs().amax(dim=2)
        # A block of zeros stays zero; infinities and NaNs make the whole block NaN, so that they are detected.
        integers = torch.nan_to_num(cut.mul_(127 / largest.clamp(min=_SMALLEST).unsqueeze(2))).round_()
        return torch.cat([integers.to(torch.int8).flatten(1).view(torch.uint8), largest.view(torch.uint8)], 1)

    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        integers, largest = packed.tensor_split([numel + -numel % self._block], 1)
        values = integers.view(torch.int8).view(len(packed), -1, self._block).float()
        values.mul_(largest.contiguous().view(torch.float32).unsqueeze(2) / 127)
        return values.flatten(1)[:, :numel]


# By the dtype that a caller names, how rows are sent between hosts.
PACKINGS: Mapping[torch.dtype, Packing] = MappingProxyType({torch.bfloat16: _Bfloat16(), torch.int8: _Quantized()})


class _Packed:
    """Sends rows in fewer bits.

    Args:
        block: elements that share a scale.
        dtype: ``torch.int8`` or ``torch.bfloat16``, which needs no scales.
    """

    def __init__(self, block: int = 256, dtype: torch.dtype = torch.int8) -> None:
        if dtype not in PACKINGS:
            raise OptionError(f"dtype is {' or '.join(map(str, PACKINGS))}; got {dtype!r}.")
        self._packing = _Quantized(block) if dtype is torch.int8 else PACKINGS[dtype]

    @staticmethod
    def _started(
        work: Any, output_tensor: torch.Tensor, values: Callable[[], torch.Tensor], *, async_op: bool
    ) -> Pending | None:
        """Return the pending result, or wait for it; ``values``, to be copied to the output, follow from the work."""

        def finish() -> torch.Tensor:
            with torch.no_grad():
                found = values()
                output_tensor.view(found.shape).copy_(found)
            return output_tensor

        pending = Pending([work], output_tensor, finish)
        if async_op:
            return pending
        pending.wait()
        return None


class QuantizedAllGather(_Packed):
    """Implements :class:`AllGather` in fewer bits. All ranks use the same rounded values, also for their own slice.

    Args:
        block: elements that share a scale.
        dtype: ``torch.int8``, or ``torch.bfloat16``, which has no scales.

    Raises:
        OptionError: if ``block`` is below 1, or another ``dtype``.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        """Implement :class:`AllGather`."""
        size, numel = dist.get_world_size(group), input_tensor.numel()
        own = self._packing.pack(input_tensor.view(1, -1))
        packed = own.new_empty(size, own.shape[1])
        work = torch_comm.all_gather_single(packed.view(-1), own.view(-1), group=group, async_op=True)
        return self._started(work, output_tensor, lambda: self._packing.unpack(packed, numel), async_op=async_op)


class QuantizedReduceScatter(_Packed):
    """Implements :class:`ReduceScatter` in fewer bits: each rank's part is rounded once, and summed in fp32.

    Args:
        block: elements that share a scale.
        dtype: ``torch.int8``, or ``torch.bfloat16``, which has no scales.

    Raises:
        OptionError: if ``block`` is below 1, or another ``dtype``.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Pending | None:
        """Implement :class:`ReduceScatter`; an OptionError says that ``op`` is not ``ReduceOp.SUM``."""
        if op != dist.ReduceOp.SUM:
            raise OptionError(f"QuantizedReduceScatter sums; got op={op}. Divide afterwards.")
        size, numel = dist.get_world_size(group), output_tensor.numel()
        sent = self._packing.pack(input_tensor.view(size, numel))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return self._started(
            work, output_tensor, lambda: self._packing.unpack(received, numel).sum(0), async_op=async_op
        )
