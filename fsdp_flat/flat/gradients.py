"""Gradients of one handle between the first one of a backward pass and its reduction."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_flat.layout import FlatLayout

__all__ = ["GradientWindow", "PartialGrad"]


class GradientWindow:
    """One flat buffer into which gradients are laid as they come: copied (and cast) first, added after.

    Args:
        layout: the handle's layout.
        dtype: dtype of the buffer.
        device: device of the gradients.
    """

    __slots__ = ("_buffer", "_layout", "landed", "num_landed")

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._buffer = torch.empty(layout.numel, dtype=dtype, device=device)
        self.landed = bytearray(len(layout.slots))
        self.num_landed = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._buffer.nbytes

    def land(self, index: int, grad: torch.Tensor) -> None:
        """Take the gradient of slot ``index`` (the parameter's shape, any float dtype)."""
        slot = self._layout.slots[index]
        place = self._buffer[slot.interval.to_slice()].view(slot.shape)
        if grad.is_sparse:
            grad = grad.to_dense()
        if self.landed[index]:
            place.add_(grad)
        else:
            place.copy_(grad)
            self.landed[index] = 1
            self.num_landed += 1

    def close(self) -> torch.Tensor:
        """The flat gradient, complete: zero where nothing came and in the padding."""
        for interval in self._layout.paddings():
            self._buffer[interval.to_slice()].zero_()
        if self.num_landed < len(self.landed):
            for slot, there in zip(self._layout.slots, self.landed, strict=True):
                if not there:
                    self._buffer[slot.interval.to_slice()].zero_()
        return self._buffer


class PartialGrad:
    """What ``param.grad`` was set to, or was left as, between two backwards inside ``no_sync``.

    Args:
        param: what the optimizer holds.
        piece: this rank's part of the waiting gradient, in the parameter's shape.
    """

    __slots__ = ("_grad", "_ours", "_param", "_version")

    def __init__(self, param: nn.Parameter, piece: torch.Tensor) -> None:
        self._param = param
        self._ours = param.grad is None
        if self._ours:
            param.grad = piece if piece.dtype == param.dtype else piece.to(param.dtype)
        self._grad = param.grad
        self._version = -1 if self._grad is None else self._grad._version

    @property
    def is_cleared(self) -> bool:
        """Whether somebody has set the gradient to None, or to zero, since."""
        grad = self._param.grad
        return grad is None or (self._changed_in_place and not bool(grad.count_nonzero()))

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written into the gradient since."""
        return self._ours and self._changed_in_place

    @property
    def _changed_in_place(self) -> bool:
        return self._param.grad is self._grad and self._grad is not None and self._grad._version != self._version

    def withdraw(self) -> None:
        """Take back what was shown."""
        if self._ours and self._param.grad is self._grad:
            self._param.grad = None
