"""Finds and maps tensors inside the arguments and results of a forward."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["StoredTensors", "differentiable_tensors", "map_tensors"]


def differentiable_tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value`` that requires a gradient, through containers, iterators over them and objects.

    An object of a class that is not a container is searched through its attributes and slots, so that outputs in a
    caller's own result class are found as well; a function through the variables that it closes over. No iterator
    is advanced.
    """
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    found: list[torch.Tensor] = []
    # Keep visited objects alive: a temporary must not reuse the id of a freed one.
    seen: dict[int, Any] = {}
    ahead = [value]
    while ahead:
        item = ahead.pop()
        if isinstance(item, torch.Tensor):
            if item.requires_grad:
                found.append(item)
        elif not _is_skipped(item) and id(item) not in seen:
            seen[id(item)] = item
            # Numbers and strings are dropped here, where a large list of them costs least.
            children = [child for child in _children(item) if type(child) not in _PLAIN_TYPES]
            children.reverse()
            ahead += children
    return found


_EMPTY_CELL = types.CellType()
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)
_PLAIN_TYPES = frozenset(_PLAIN)
# Modules are searched separately; optimizers hold every parameter and no computed tensor; imported modules and loggers
# refer to the whole program.
_SKIPPED = (*_PLAIN, torch.nn.Module, torch.optim.Optimizer, types.ModuleType, logging.Logger)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Iterators whose ``__reduce__`` returns the object that they iterate over.
_ITERABLES: tuple[Any, ...] = ([], (), set(), {}, {}.values(), {}.items())
_REVERSIBLES: tuple[Any, ...] = ([], {}, {}.values(), {}.items())
_ITERATORS: tuple[type, ...] = (
    *(type(iter(each)) for each in _ITERABLES),
    *(type(reversed(each)) for each in _REVERSIBLES),
    *(reversed, zip, map, filter, enumerate),
)


def _is_skipped(value: Any) -> bool:
    return isinstance(value, _SKIPPED) or (callable(value) and not isinstance(value, _FUNCTIONS))


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, _ITERATORS):
        try:
            return value.__reduce__()[1:]
        except RuntimeError:  # over a dict that has changed since: advancing it raises as well
            return ()
    if isinstance(value, types.FunctionType):
        closed_over = [cell for cell in value.__closure__ or () if cell != _EMPTY_CELL]
        return [*(cell.cell_contents for cell in closed_over), *(value.__defaults__ or ())]
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    slot_names = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    attributes = getattr(value, "__dict__", {}).values()
    return [*attributes, *(getattr(value, name, None) for name in slot_names)] if slot_names else attributes


def _slots_of(kind: type) -> list[str]:
    """Return the names of the slots that ``kind`` itself declares in Python."""
    if "__slots__" not in kind.__dict__:
        return []
    return [name for name, member in kind.__dict__.items() if isinstance(member, types.MemberDescriptorType)]


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
        """Return the tensors that are stored now."""
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
    """Return the tensors with autograd history in a stored value, one level deep in functions and objects."""
    if not _is_container(value):
        if isinstance(value, _PLAIN) or not (isinstance(value, _KEEPERS) or _has_slots(type(value))):
            return []
        # No deeper: a function may close over a whole program.
        value = [child for child in _children(value) if _is_container(child)]
    return [tensor for tensor in differentiable_tensors(value) if not tensor.is_leaf]


def _is_container(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple, dict)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


_KEEPERS = (types.FunctionType, functools.partial, types.SimpleNamespace)


def _has_slots(kind: type) -> bool:
    """Return whether a class or one of its bases declares slots in Python."""
    return any(_slots_of(each) for each in kind.__mro__)


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
