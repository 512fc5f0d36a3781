"""Collects the private names of torch that this package needs, each with its reason."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

# torch's composable functions (``replicate``, ``fully_shard``) note on each module which of them were called on it, and
# leave modules of the others out. There is no public way to read or write that.
_FULLY_SHARD = "fully_shard"


class FullyShardNote:
    """Notes on a module that ``fully_shard`` was called on it, for torch's ``replicate``.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._registry = module.__dict__.setdefault(REGISTRY_KEY, {})
        self._registry[_FULLY_SHARD] = RegistryItem()

    def remove(self) -> None:
        """Undo it."""
        self._registry.pop(_FULLY_SHARD, None)
