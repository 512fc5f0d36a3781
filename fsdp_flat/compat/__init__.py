"""Substitutes fsdp_flat for torch's FSDP1 (layer 6). The only package that may import torch.distributed.fsdp."""

from __future__ import annotations

from fsdp_flat.compat.installation import Installation, install, installed, uninstall
from fsdp_flat.guards.torch_functions import replace_torch_functions, restore_torch_functions

__all__ = [
    "Installation",
    "install",
    "installed",
    "replace_torch_functions",
    "restore_torch_functions",
    "uninstall",
]
