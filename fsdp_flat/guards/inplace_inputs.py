"""Keeps the autograd history of inputs that a module changes in place (``ReLU(inplace=True)``)."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_flat.core import Guard, UnitForward
from fsdp_flat.core.torch_core import preserve_version


class _TakeHistory(torch.autograd.Function):
    """Gives ``tensor`` the autograd history of ``alias``, which shares its memory and was changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, grads[0]


class InplaceInputs(Guard):
    """Gives the caller's tensors the history of in-place changes of their aliases, which the module gets.

    A module gets an alias of each input that requires a gradient, with the hook that ends the unit's backward.
    """

    def after_compute(self, forward: UnitForward) -> None:
        """Follow changes that the module has made to its inputs in place."""
        for given, alias, version in () if forward.call is None else forward.call.hooked:
            if alias._version != version:
                # The data does not change here, so values that autograd saved stay valid.
                with preserve_version(given):
                    _TakeHistory.apply(given, alias)
