"""Finds tensors that left the meta device and were not written since, by a mark in their memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_flat.errors import UsageError
from fsdp_flat.flat import adapter_if_dtensor, unguarded

__all__ = ["MarksEmpty", "Unwritten", "is_marked", "unwritten_error"]

# By bytes per element: the dtype for reading the bits, and a pattern, a NaN in every floating-point dtype, that no
# initialisation writes.
_MARKS = {
    8: (torch.int64, 0x7FFDF1A77FEDF1A7),
    4: (torch.int32, 0x7FEDF1A7),
    2: (torch.int16, 0x7FED),
    1: (torch.uint8, 0x7F),
}
# 0x7F is a possible one-byte integer, but not in this many elements at once.
_FEWEST_BYTES = 8
_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty}
_EMPTY.add(_aten.new_empty_strided)


class MarksEmpty(TorchDispatchMode):
    """Fills memory that is allocated without being written (``to_empty``, ``torch.empty``) with the mark."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY:
            bits, mark = _bits(result)
            if bits is not None:
                bits.fill_(mark)
        return result


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    local = adapter_if_dtensor(tensor).to_local(tensor.detach())
    if local.is_meta or local.layout is not torch.strided or local.is_quantized or local.itemsize not in _MARKS:
        return None, 0
    dtype, mark = _MARKS[local.itemsize]
    return local.view(dtype), mark


def is_marked(tensor: torch.Tensor) -> bool:
    """Return whether nothing was written to ``tensor`` since it was allocated inside :class:`MarksEmpty`."""
    bits, mark = _bits(tensor)
    if bits is None or bits.numel() == 0:
        return False
    if tensor.dtype in (torch.int8, torch.uint8) and bits.numel() < _FEWEST_BYTES:
        return False
    # For most tensors the first element shows that they were written.
    return bool((bits[(0,) * bits.dim()] == mark).item() and (bits == mark).all())


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Describes a tensor of a unit that had no values when the unit was built.

    Attributes:
        fqn: its name relative to the unit's module.
        read: returns this rank's current part of it.
        is_param: True for a parameter, False for a buffer.
    """

    fqn: str
    read: Callable[[], torch.Tensor | None]
    is_param: bool

    @property
    def is_still(self) -> bool:
        """Return whether the tensor still has no values."""
        with unguarded():
            tensor = self.read()
            if tensor is None or tensor.numel() == 0:
                return False
            # A conversion to another dtype keeps a NaN, but not its bits.
            is_nan = tensor.is_floating_point() and tensor.itemsize > 1
            return bool(tensor.isnan().all()) if is_nan else is_marked(tensor)


def unwritten_error(entries: Iterable[tuple[str, Unwritten]]) -> UsageError | None:
    """Return an error that lists the parameters that still have no values, or None; warn of buffers.

    Args:
        entries: names of units, and their tensors that had no values when the unit was built.
    """
    left = [(f"{entry.fqn!r} of unit {unit!r}", entry.is_param) for unit, entry in entries if entry.is_still]
    buffers = [name for name, is_param in left if not is_param]
    if buffers:
        warnings.warn(
            f"Buffers left the meta device and were never written, so their values are undefined: {', '.join(buffers)}"
            ". A state dict holds persistent buffers only; compute the others in reset_parameters() or param_init_fn.",
            stacklevel=2,
        )
    params = [name for name, is_param in left if is_param]
    if not params:
        return None
    return UsageError(
        f"Parameters left the meta device and were never written, so their values are undefined: "
        f"{', '.join(params)}. Initialise them in reset_parameters() or param_init_fn, or load them."
    )
