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


class FullyShardMark:
    """Marks a module that ``fully_shard`` was called on: by its class, and for torch and programs that ask torch.

    torch's ``replicate`` looks for a note on the module, and programs for its state in torch's map of modules to
    states, which refers to the state weakly; this object keeps it.

    Args:
        module: the module.
        sharded_class: its class from now on, made of :class:`FSDPModule` and its own.
        state: FSDP2's view of the module's unit.
    """

    def __init__(self, module: nn.Module, sharded_class: type[nn.Module], state: Any) -> None:
        self._module, self._state = module, state
        self._registry = module.__dict__.setdefault(REGISTRY_KEY, {})
        self._registry[_FULLY_SHARD] = RegistryItem()
        _module_state_mapping[module] = ref(state)
        module.__class__ = sharded_class

    def remove(self) -> None:
        """Undo it."""
        self._module.__class__ = type(self._module).__bases__[1]
        _module_state_mapping.pop(self._module, None)
        self._registry.pop(_FULLY_SHARD, None)
