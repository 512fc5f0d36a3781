"""Finds and maps tensors in containers: the arguments and results of a forward.

Searched are mappings, lists, tuples, sets, deques, dataclasses, and classes that are registered with
``torch.utils._pytree.register_pytree_node``. Objects of other classes, functions and iterators are opaque: a unit whose
outputs are all inside of such objects stays unsharded until its backward.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from fsdp_flat.core.torch_core import pytree_children


def differentiable_tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value`` that requires a gradient, in order, each as often as it occurs."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value``, in order, each as often as it occurs."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def are_tensors(value: Any, *, among: Any) -> bool:
    """Return whether ``value`` is tensors of ``among``, at least one, beside numbers and strings.

    It is not if an opaque object in it may hold others.
    """
    known, leaves = {id(tensor) for tensor in tensors_in(among)}, _leaves(value)
    return bool(leaves) and all(id(leaf) in known for leaf in leaves)


def _leaves(value: Any) -> list[Any]:
    """Return the tensors and the opaque objects in ``value``, in order, without numbers and strings."""
    found: list[Any] = []
    # Keep visited objects alive: a temporary must not reuse the id of a freed one.
    seen: dict[int, Any] = {}
    ahead = [value]
    while ahead:
        item = ahead.pop()
        children = None if isinstance(item, torch.Tensor) else _children(item)
        if children is None:
            found.append(item)
        elif id(item) not in seen:
            seen[id(item)] = item
            # Numbers and strings are dropped here, where a large list of them costs least.
            ahead += [child for child in children if type(child) not in PLAIN_TYPES][::-1]
    return found


PLAIN_TYPES = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device})


def _children(value: Any) -> Iterable[Any] | None:
    """Return the children of a container; None for an opaque object."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return pytree_children(value)


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor], *, in_place: bool = False) -> Any:
    """Apply ``fn`` to every tensor in lists, tuples, named tuples, sets, dicts and dataclasses; return the result.

    A container in which nothing changed is returned as it is, others are copied; with ``in_place`` lists, dicts and
    dataclasses are changed themselves. A mapping that cannot be written to is opaque.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) in PLAIN_TYPES:
        return value
    assign: Callable[[Any, Any, Any], None] = operator.setitem
    if isinstance(value, MutableMapping):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    elif isinstance(value, (tuple, set, frozenset)):
        mapped = [map_tensors(item, fn, in_place=in_place) for item in value]
        return value if all(map(operator.is_, mapped, value)) else _rebuilt(value, mapped)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
        assign = object.__setattr__  # a frozen one too
    else:
        return value
    changed = [(key, new) for key, old in entries if (new := map_tensors(old, fn, in_place=in_place)) is not old]
    if changed and not in_place:
        value = copy.copy(value)
    for key, new in changed:
        assign(value, key, new)
    return value


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """Return a tuple or set like ``value`` with other items; the constructor of a subclass may take other arguments."""
    if not isinstance(value, tuple) or hasattr(value, "n_sequence_fields"):  # results of torch.max, for example
        return type(value)(items)
    rebuilt: Any = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        rebuilt.__dict__.update(value.__dict__)
    return rebuilt


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class CallInputs:
    """Replaces tensors in the inputs of a call by aliases until it has ended, inside of the caller's own containers.

    The module may write to these containers (a cache, a batch), so it must not be given copies.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._containers = [each for each in (*args, *kwargs.values()) if not isinstance(each, torch.Tensor)]
        self._given = differentiable_tensors(self._containers)
        # The caller's tensors by their aliases.
        self._originals: dict[torch.Tensor, torch.Tensor] = {}

    def trainable(self) -> list[torch.Tensor]:
        """Return the tensors that require gradients and can be replaced, each once."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        map_tensors((self._args, self._kwargs), lambda tensor: found.setdefault(tensor, tensor))
        return [tensor for tensor in found if tensor.requires_grad]

    def replaced(self, tensors: Sequence[torch.Tensor], aliases: Sequence[torch.Tensor]) -> Inputs:
        """Replace ``tensors`` by ``aliases``; return what the module gets."""
        alias_of = dict(zip(tensors, aliases, strict=True))
        self._originals = dict(zip(aliases, tensors, strict=True))
        replace = partial(map_tensors, fn=lambda tensor: alias_of.get(tensor, tensor), in_place=True)
        return tuple(map(replace, self._args)), {name: replace(each) for name, each in self._kwargs.items()}

    def written(self) -> list[torch.Tensor]:
        """Return the tensors with autograd history that the call has put into the caller's containers."""
        known = {*self._given, *self._originals}
        held = differentiable_tensors(self._containers) if self._containers else []
        return [tensor for tensor in held if not tensor.is_leaf and tensor not in known]

    def replace(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` to every tensor in the caller's containers."""
        for container in self._containers:
            map_tensors(container, fn, in_place=True)

    def restore(self) -> None:
        """Put the caller's tensors back, wherever their aliases still are in the caller's containers."""
        if self._originals:
            self.replace(lambda tensor: self._originals.get(tensor, tensor))
