"""Collects the private names of torch that this package needs, each with its reason."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping

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


class StateNote:
    """Notes the state of a module in torch's map of modules to states, in which programs look for sharded modules.

    The map refers to the state weakly; this object keeps it.

    Args:
        module: the module.
        state: FSDP2's view of the module's unit.
    """

    def __init__(self, module: nn.Module, state: Any) -> None:
        self._module, self._state = module, state
        _module_state_mapping[module] = ref(state)

    def remove(self) -> None:
        """Undo it."""
        _module_state_mapping.pop(self._module, None)
