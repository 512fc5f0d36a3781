"""Finds and maps tensors inside the arguments and results of a forward.

Searched are mappings, lists, tuples, sets, deques, dataclasses, and classes that are registered with
``torch.utils._pytree.register_pytree_node``. Objects of other classes, functions and iterators are opaque: a unit whose
outputs are all inside of such objects stays unsharded until its backward.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fsdp_flat.flat import pytree_children


def differentiable_tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value`` that requires a gradient, in order, each as often as it occurs."""
    found: list[torch.Tensor] = []
    # Keep visited objects alive: a temporary must not reuse the id of a freed one.
    seen: dict[int, Any] = {}
    ahead = [value]
    while ahead:
        item = ahead.pop()
        if isinstance(item, torch.Tensor):
            if item.requires_grad:
                found.append(item)
        elif id(item) not in seen:
            seen[id(item)] = item
            # Numbers and strings are dropped here, where a large list of them costs least.
            children = [child for child in _children(item) if type(child) not in _LEAVES]
            children.reverse()
            ahead += children
    return found


_LEAVES = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device})


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return pytree_children(value)


class StoredTensors:
    """Finds differentiable tensors that modules store as attributes in forward (an auxiliary loss, a cache).

    A loss may use them, so backward may reach the unit through them instead of its outputs. All attributes are searched
    after the first forward that saves for backward; after that only those that held such a tensor, and periodically all
    again.

    Args:
        modules: the unit's own modules.

    Attributes:
        places: attributes that held such a tensor, as ``(attributes, name)``.
        num_until_search: forwards until all attributes are searched; the caller counts down.
    """

    _SEARCH_EVERY = 64

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self.places: list[tuple[dict[str, Any], str]] = []
        self.num_until_search = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensors:
        return StoredTensors(copy.deepcopy(self._modules, memo))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors with autograd history that are stored now."""
        if self.num_until_search <= 0:
            self.num_until_search = self._SEARCH_EVERY
            self.places = [
                (module.__dict__, name)
                for module in self._modules
                for name, value in module.__dict__.items()
                if name not in _MODULE_STATE and _derived(value)
            ]
        return [tensor for attributes, name in self.places for tensor in _derived(attributes.get(name))]


_MODULE_STATE = frozenset(torch.nn.Module().__dict__)


def _derived(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in differentiable_tensors(value) if not tensor.is_leaf]


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``fn`` to every tensor in lists, tuples, named tuples, dicts and dataclasses; return the result.

    A container in which nothing changed is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, fn) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        if type(value) is dict:
            return items
        copied: Any = copy.copy(value)
        for key, item in items.items():
            copied[key] = item
        return copied
    if isinstance(value, (list, tuple)):
        mapped = [map_tensors(item, fn) for item in value]
        if all(new is old for new, old in zip(mapped, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*mapped)
        return type(value)(mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: new
            for field in dataclasses.fields(value)
            if field.init and (new := map_tensors(old := getattr(value, field.name), fn)) is not old
        }
        return dataclasses.replace(value, **changed) if changed else value
    return value
