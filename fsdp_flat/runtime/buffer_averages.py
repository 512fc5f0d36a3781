"""Finds the buffers that a state dict holds, and averages them over ranks on request."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.comm import ErrorTexts, ShardingGroups, agree
from fsdp_flat.core.averages import means
from fsdp_flat.layout import clean_fqn, join_fqn

_TEXTS = ErrorTexts("averaging buffers", "Ranks have different buffers.", "Register the same buffers on every rank.")


def persistent_buffers(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the persistent buffers below ``root``, each once, without DTensors."""
    found: dict[torch.Tensor, str] = {}
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():
            persists = buffer is not None and name not in module._non_persistent_buffers_set
            if persists and not isinstance(buffer, DTensor):
                found.setdefault(buffer, clean_fqn(join_fqn(path, name)))
    return {name: buffer for buffer, name in found.items()}


def average_buffers(root: nn.Module, groups: ShardingGroups) -> None:
    """Replace each persistent buffer by its mean over ranks; an integer one by the maximum.

    Boolean buffers are unchanged. Every rank of the groups must call this, with the same buffers.
    """
    with torch.no_grad():
        buffers = {name: buffer for name, buffer in persistent_buffers(root).items() if buffer.dtype is not torch.bool}
        lines = [f"buffer {name!r} {tuple(buffer.shape)} of {buffer.dtype}" for name, buffer in buffers.items()]
        agree(lines, None, groups.rank_groups, _TEXTS)
        for buffer, mean in zip(buffers.values(), means([*buffers.values()], groups, "buffers"), strict=True):
            buffer.copy_(mean.to_sparse(buffer.sparse_dim()) if buffer.is_sparse else mean)
