"""Layer 6: fsdp_flat in the place of torch's FSDP1. The only folder that may import torch.distributed.fsdp."""

from __future__ import annotations

from fsdp_flat.compat.installation import Installation, Replaced, install, installed, uninstall

__all__ = ["Installation", "Replaced", "install", "installed", "uninstall"]
