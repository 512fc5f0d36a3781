"""Keeps right what a module hands to its caller: inputs that it changed in place, and views of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fsdp_flat.core.containers import CallInputs, map_tensors, tensors_in
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.torch_core import is_alias, local_of, preserve_version


class _TakeHistory(torch.autograd.Function):
    """Gives ``tensor`` the autograd history of ``alias``, which shares its memory and was changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, grads[0]


def take_history(given: torch.Tensor, alias: torch.Tensor) -> None:
    """Give an input the autograd history of the alias that the module got in its place, and changed in place."""
    # The data does not change here, so values that autograd saved stay valid.
    with preserve_version(given):
        _TakeHistory.apply(given, alias)


def without_views(output: Any, inputs: CallInputs | None, param_groups: Iterable[ParamGroup]) -> Any:
    """Copy views of all-gathered parameters, whose memory a reshard frees; return the output with the copies.

    Those in the caller's containers, ``inputs``, are replaced there.
    """
    buffers: list[torch.Tensor] = []
    for param_group in param_groups:
        if param_group.output.owns_memory:
            buffers += param_group.output.tensors
    if not buffers:
        return output

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        local = local_of(tensor)
        if local.layout is torch.strided:  # tensors of other layouts have no storage
            for buffer in buffers:
                if is_alias(local, buffer):
                    return tensor.clone()
        return tensor

    if inputs is not None:
        inputs.replace(copied)
    if isinstance(output, torch.Tensor):
        return copied(output)
    if any(copied(tensor) is not tensor for tensor in tensors_in(output)):
        return map_tensors(output, copied)
    return output
