"""Casts inputs and outputs of modules, and buffers, between their own dtype and that of compute."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_flat.core.containers import Inputs, map_tensors
from fsdp_flat.layout import FSDP_WRAPPED_MODULE, clean_fqn, join_fqn


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value``, any structure of tensors, with floating-point tensors cast to ``dtype``."""
    return map_tensors(value, partial(_cast, dtype))


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward by name; of a wrapper's those of the module in it."""
    while FSDP_WRAPPED_MODULE in module._modules:
        module = module.get_submodule(FSDP_WRAPPED_MODULE)
    return inspect.signature(module.forward).parameters


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
    positional = tuple(forward_parameters(module))

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


_MAX_NESTED_CALLS = 64


class _FullPrecision:
    """Casts the inputs of a module to full precision and its outputs back, with two forward hooks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # The dtype of the inputs of each call under way: a module may call itself. A recomputation that stops early
        # leaves its entry, so the oldest ones are dropped.
        self._given: deque[torch.dtype | None] = deque(maxlen=_MAX_NESTED_CALLS)

    def cast_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._given.append(None)
        return map_tensors((args, kwargs), self._widened)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = _cast(self._dtype, tensor)
        if wide is not tensor:
            self._given[-1] = tensor.dtype
        return wide

    def cast_outputs(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        given = self._given.pop() if self._given else None
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
