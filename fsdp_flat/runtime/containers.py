"""Finds, maps and casts tensors: those in the arguments and results of a forward, and buffers.

Searched are mappings, lists, tuples, sets, deques, dataclasses, and classes that are registered with
``torch.utils._pytree.register_pytree_node``. Objects of other classes, functions and iterators are opaque: a unit whose
outputs are all inside of such objects stays unsharded until its backward.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_flat.flat import pytree_children
from fsdp_flat.layout import FSDP_WRAPPED_MODULE, clean_fqn, join_fqn


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
            ahead += [child for child in children if type(child) not in _PLAIN_TYPES][::-1]
    return found


_PLAIN_TYPES = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device})


def _children(value: Any) -> Iterable[Any] | None:
    """Return the children of a container; None for an opaque object."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return pytree_children(value)


class StoredTensors:
    """Finds differentiable tensors that modules store as attributes in forward (an auxiliary loss, a cache).

    A loss may use them, and a backward then reaches the unit through them before it reaches an output. All attributes
    are searched after the first forward, and after one in which modules got further attributes. After other forwards
    only those are that held a tensor then, or nothing: None, zero, or an empty container.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = [module.__dict__ for module in modules]
        self._num_attributes = 0
        # Attributes that may hold such a tensor, as those of a module and a name.
        self._places: list[tuple[dict[str, Any], str]] = []

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors with autograd history that are stored now."""
        num_attributes = sum(map(len, self._attributes))
        if num_attributes != self._num_attributes:
            self._num_attributes = num_attributes
            self._places = [
                (attributes, name)
                for attributes in self._attributes
                for name, value in attributes.items()
                if name not in _MODULE_STATE and _may_hold_tensors(value)
            ]
        if not self._places:
            return []
        values = [held.get(name) for held, name in self._places]
        return [tensor for tensor in differentiable_tensors(values) if not tensor.is_leaf]


def _may_hold_tensors(value: Any) -> bool:
    is_empty = isinstance(value, (int, float, Mapping, list, set, deque)) and not value and value is not False
    # Parameters of a unit with use_orig_params=False are attributes too.
    return value is None or is_empty or any(not isinstance(tensor, nn.Parameter) for tensor in tensors_in(value))


_MODULE_STATE = frozenset(nn.Module().__dict__)


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor], *, in_place: bool = False) -> Any:
    """Apply ``fn`` to every tensor in lists, tuples, named tuples, sets, dicts and dataclasses; return the result.

    A container in which nothing changed is returned as it is, others are copied; with ``in_place`` lists, dicts and
    dataclasses are changed themselves. A mapping that cannot be written to is opaque.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) in _PLAIN_TYPES:
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


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value``, any structure of tensors, with floating-point tensors cast to ``dtype``."""
    return map_tensors(value, partial(_cast, dtype))


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor


def input_cast(
    module: nn.Module, dtype: torch.dtype, uncast: frozenset[str]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Inputs]:
    """Return a function that casts floating-point inputs of a module's forward, except arguments named ``uncast``.

    Containers in which it casts something are copied: an activation checkpoint in the module keeps its inputs, and
    recomputes with them when the forward is over.
    """
    cast = partial(_cast, dtype)
    if not uncast:
        return lambda args, kwargs: map_tensors((args, kwargs), cast)
    while FSDP_WRAPPED_MODULE in module._modules:
        module = module.get_submodule(FSDP_WRAPPED_MODULE)
    positional = tuple(inspect.signature(module.forward).parameters)

    def cast_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        names = positional + ("",) * len(args)
        named = [*zip(names, args, strict=False), *kwargs.items()]
        values = [value if name in uncast else map_tensors(value, cast) for name, value in named]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    return cast_others


class BufferCasts:
    """Casts the floating-point buffers of a unit's own ``modules`` between their registered dtype and ``dtype``.

    As on FSDP1, values that were rounded once stay so.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._buffers: list[tuple[nn.Module, str, torch.dtype]] = []
        # The registered dtypes by names below the unit's module.
        self._registered: dict[str, torch.dtype] = {}
        if dtype is None:
            return
        # A module that is registered twice contributes every name of its buffers to state dicts.
        paths: dict[nn.Module, list[str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            paths.setdefault(module, []).append(path)
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    self._buffers.append((module, name, buffer.dtype))
                    self._registered.update({clean_fqn(join_fqn(path, name)): buffer.dtype for path in paths[module]})

    def cast(self, *, full: bool) -> None:
        """Cast the buffers to the compute dtype, or with ``full`` to their registered dtype."""
        for module, name, registered in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                buffer.data = buffer.data.to(registered if full else self._dtype)

    def restore(self, destination: dict[str, Any], prefix: str) -> None:
        """Cast the buffers in a state dict to their registered dtype."""
        for name, registered in self._registered.items():
            if prefix + name in destination:
                destination[prefix + name] = destination[prefix + name].to(registered)


class _FullPrecision:
    """Casts the inputs of a module to full precision and its outputs back, with two forward hooks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # That of the inputs of the last call that were cast.
        self._given: torch.dtype | None = None

    def cast_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._given = None
        return map_tensors((args, kwargs), self._widened)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = _cast(self._dtype, tensor)
        if wide is not tensor:
            self._given = tensor.dtype
        return wide

    def cast_outputs(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        given = self._given
        if given is None:
            return None
        return map_tensors(output, lambda tensor: tensor.to(given) if tensor.dtype == self._dtype else tensor)


def keep_full_precision(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Make ``module`` compute in ``dtype``: floating-point inputs are cast to it and outputs back."""
    casts = _FullPrecision(dtype)
    module.register_forward_pre_hook(casts.cast_inputs, with_kwargs=True)
    module.register_forward_hook(casts.cast_outputs)


def drop_full_precision(module: nn.Module) -> None:
    """Undo :func:`keep_full_precision`; do nothing for other modules."""
    hooks: dict[int, Any]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _FullPrecision)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
