"""Has a model that runs without memory allocate what fused kernels of an accelerator allocate, and not the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fsdp_flat.comm import PLANNED
from fsdp_flat.tools.torch_tools import HAS_FUSED_RMS_NORM


class AcceleratorFunctions(TorchFunctionMode):
    """Replaces functions for which torch has one kernel on accelerators and several on the CPU.

    The CPU's keep other tensors for backward: RMSNorm its input in fp32, dropout a mask of the input's dtype, and
    attention with dropout its matrix of weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.rms_norm, torch.rms_norm):
            return _rms_norm(func, *args, **kwargs)
        if func in (functional.dropout, torch.dropout):
            return _dropout(func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if kwargs.get("device") == "cpu" and not kwargs.get("pin_memory"):
            kwargs = {**kwargs, "device": PLANNED}  # as ``x.device.type`` names it
        return func(*args, **kwargs)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(num_rows, dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return torch.empty_like(x) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, None


def _rms_norm(
    func: Any,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    # The kernel needs equal dtypes.
    if not HAS_FUSED_RMS_NORM or weight is None or weight.dtype != input.dtype:
        return func(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, weight, input.numel() // max(1, weight.numel()))


def _dropout(
    func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, *inplace: bool, **kwargs: bool
) -> Any:
    if training and p and not any((*inplace, *kwargs.values())):
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, training, *inplace, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Kernels of accelerators draw the mask of dropout again in backward, and do not keep it.
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)
