"""Tensors inside the arguments and results of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["StoredTensors", "differentiable_tensors", "map_tensors"]


def differentiable_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value`` that requires a gradient, through lists, tuples, dicts, dataclasses and objects.

    An object of a class that is none of these is searched through its attributes, so that outputs in a
    caller's own result class are found as well.
    """
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.nn.Module)


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
        return
    if isinstance(value, _LEAVES) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        children = getattr(value, "__dict__", {}).values()
    for child in list(children):
        _collect(child, found, seen)


class StoredTensors:
    """Differentiable tensors that modules keep as attributes in forward (an auxiliary loss, a cache).

    A loss may be made of them, so backward may reach the unit through them instead of its outputs. All
    attributes are searched after the first forward that saves for backward; after that only those that held
    such a tensor, and all again every so often.

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
        """What is stored now."""
        if self.num_until_search <= 0:
            self.num_until_search = self._SEARCH_EVERY
            self.places = [
                (module.__dict__, name)
                for module in self._modules
                for name, value in module.__dict__.items()
                if _may_hold_tensors(name, value) and _derived(value)
            ]
        return [tensor for attributes, name in self.places for tensor in _derived(attributes.get(name))]


_MODULE_STATE = frozenset(torch.nn.Module().__dict__)


def _may_hold_tensors(name: str, value: Any) -> bool:
    return name not in _MODULE_STATE and (
        isinstance(value, (torch.Tensor, list, tuple, dict)) or dataclasses.is_dataclass(value)
    )


def _derived(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in differentiable_tensors(value) if not tensor.is_leaf]


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``fn`` applied to every tensor in lists, tuples, named tuples, dicts and dataclasses.

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
