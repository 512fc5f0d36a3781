"""Validates ``MixedPrecision`` and casts inputs, outputs and buffers to its dtypes."""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError
from fsdp_flat.layout import clean_fqn, join_fqn
from fsdp_flat.runtime.tensors import map_tensors


@dataclass(frozen=True, slots=True)
class Precision:
    """Holds a validated ``MixedPrecision``; see there for the fields.

    Attributes:
        full_in_eval: forwards in eval mode run in full precision (``FSDP_USE_FULL_PREC_IN_EVAL=1``).
        ignored_classes: ``_module_classes_to_ignore``.
        output_dtype: dtype to which floating-point outputs of the unit are cast; None leaves them.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    keep_low_precision_grads: bool
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool
    master_dtype: torch.dtype | None
    full_precision_modules: tuple[type[nn.Module], ...]
    uncast_inputs: frozenset[str]
    full_in_eval: bool
    ignored_classes: tuple[type[nn.Module], ...] = ()
    output_dtype: torch.dtype | None = None

    def is_full_in(self, module: nn.Module) -> bool:
        """Return whether a module of a unit with this precision nevertheless computes in full precision.

        It does if the caller requested it, or if low precision cannot run: batch norm accepts parameters of its
        inputs' dtype only if its running statistics have this dtype too.
        """
        if isinstance(module, self.full_precision_modules):
            return True
        statistics = self._statistics_dtype(module)
        return statistics not in (None, self.param_dtype) and any(True for _ in module.parameters(recurse=False))

    def rounds_statistics_of(self, module: nn.Module) -> bool:
        """Return whether a module updates running statistics in a dtype shorter than 4 bytes in training."""
        statistics = None if self.is_full_in(module) else self._statistics_dtype(module)
        return statistics is not None and statistics.itemsize < 4 and statistics == self.buffer_dtype

    def _statistics_dtype(self, module: nn.Module) -> torch.dtype | None:
        """Return the compute dtype of a batch norm's running statistics, or None.

        It is None without statistics, without ``param_dtype``, and for modules outside of ``ignored_classes``.
        """
        if self.param_dtype is None or not (
            isinstance(module, self.ignored_classes) and isinstance(module, _BatchNorm)
        ):
            return None
        dtype = next((b.dtype for b in module._buffers.values() if b is not None and b.is_floating_point()), None)
        return dtype and (self.buffer_dtype or dtype)


def precision_of_rows(policy: Any) -> Precision:
    """Convert a ``MixedPrecisionPolicy`` of ``fully_shard`` (ours or torch's) to a :class:`Precision`.

    Raises:
        OptionTypeError: ``policy`` or one of its dtypes has the wrong type.
        UnsupportedError: it has a dtype for each parameter.
    """
    if not any(kind.__name__ == "MixedPrecisionPolicy" for kind in type(policy).__mro__):
        raise OptionTypeError(f"mp_policy must be a MixedPrecisionPolicy; got {type(policy).__name__}.")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise OptionTypeError(f"MixedPrecisionPolicy.{name} must be a torch.dtype or None; got {dtype!r}.")
    # A field of torch's class since 2.15.
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise UnsupportedError(
            "MixedPrecisionPolicy.param_dtype_override_fn is not supported: parameters of one call have one dtype in "
            "compute. Call fully_shard with another mp_policy on the modules that hold the others."
        )
    return Precision(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype or policy.param_dtype,
        buffer_dtype=None,
        keep_low_precision_grads=False,
        cast_forward_inputs=policy.cast_forward_inputs,
        cast_root_forward_inputs=False,
        master_dtype=None,
        full_precision_modules=(),
        uncast_inputs=frozenset(),
        full_in_eval=False,
        output_dtype=policy.output_dtype,
    )


def precision_from(value: Any) -> Precision:
    """Convert a ``MixedPrecision`` (ours or torch's) or None to a :class:`Precision`.

    Raises:
        OptionTypeError: ``value`` or one of its fields has the wrong type.
        OptionError: a field is not a floating-point dtype.
    """
    if value is not None and not any(kind.__name__ == "MixedPrecision" for kind in type(value).__mro__):
        raise OptionTypeError(f"mixed_precision must be a MixedPrecision; got {type(value).__name__}.")
    dtypes: dict[str, torch.dtype | None] = {}
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "master_dtype"):
        dtype = getattr(value, name, None)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise OptionTypeError(f"MixedPrecision.{name} must be a torch.dtype or None; got {dtype!r}.")
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(f"MixedPrecision.{name} must be a floating-point dtype; got {dtype}.")
        dtypes[name] = dtype
    return Precision(
        param_dtype=dtypes["param_dtype"],
        reduce_dtype=dtypes["reduce_dtype"] or dtypes["param_dtype"],
        buffer_dtype=dtypes["buffer_dtype"],
        keep_low_precision_grads=bool(getattr(value, "keep_low_precision_grads", False)),
        cast_forward_inputs=bool(getattr(value, "cast_forward_inputs", False)),
        cast_root_forward_inputs=bool(getattr(value, "cast_root_forward_inputs", True)),
        master_dtype=dtypes["master_dtype"],
        full_precision_modules=_classes(getattr(value, "full_precision_modules", ())),
        uncast_inputs=_names(getattr(value, "uncast_inputs", ())),
        full_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1",
        ignored_classes=tuple(getattr(value, "_module_classes_to_ignore", ())),
    )


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value``, any structure of tensors, with floating-point tensors cast to ``dtype``."""
    return map_tensors(value, partial(_cast, dtype))


def _classes(value: Any) -> tuple[type[nn.Module], ...]:
    found = (value,) if isinstance(value, type) else tuple(value)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise OptionTypeError(f"MixedPrecision.full_precision_modules must hold module classes; got {kind!r}.")
    return found


def _names(value: Any) -> frozenset[str]:
    # A single name is not a set of characters.
    found = frozenset({value} if isinstance(value, str) else value)
    for name in found:
        if not isinstance(name, str):
            raise OptionTypeError(f"MixedPrecision.uncast_inputs must hold names of arguments; got {name!r}.")
    return found


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


class InputCast:
    """Casts floating-point forward inputs of one module to its compute dtype.

    Args:
        module: the module whose forward is called.
        dtype: the compute dtype.
        uncast: names of arguments that are not cast.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, uncast: frozenset[str]) -> None:
        self._cast = partial(_cast, dtype)
        self._uncast = uncast
        self._positional: tuple[str, ...] = ()
        if uncast:
            self._positional = tuple(inspect.signature(module.forward).parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs with floating-point tensors cast."""
        if not self._uncast:
            return map_tensors((args, kwargs), self._cast)
        names = self._positional + ("",) * len(args)
        named = [*zip(names, args, strict=False), *kwargs.items()]
        cast = [value if name in self._uncast else map_tensors(value, self._cast) for name, value in named]
        return tuple(cast[: len(args)]), dict(zip(kwargs, cast[len(args) :], strict=True))


@dataclass(slots=True, eq=False)
class _LowBuffer:
    """Describes a buffer whose compute dtype differs from its registered dtype.

    Attributes:
        module: module that it is registered on.
        name: its name in that module.
        paths: its names below the unit's module.
        dtype: the registered dtype.
        exact: while the buffer is in the compute dtype, its values before rounding; None if unavailable.
    """

    module: nn.Module
    name: str
    paths: tuple[str, ...]
    dtype: torch.dtype
    exact: torch.Tensor | None = None

    def widened(self, low: torch.Tensor) -> torch.Tensor:
        """Return ``low`` in the registered dtype; elements equal to the rounded exact values become the exact ones."""
        wide = low.to(self.dtype)
        if wide is low or self.exact is None or self.exact.shape != low.shape:
            return wide
        exact = self.exact.to(low.device)
        return torch.where(wide == exact.to(low.dtype).to(self.dtype), exact, wide)


class BufferCasts:
    """Casts the buffers of one unit between their registered dtype and the compute dtype.

    Args:
        root: the unit's module.
        modules: the unit's own modules.
        dtype: compute dtype of floating-point buffers; None leaves them unchanged.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._is_low = False
        self._buffers: list[_LowBuffer] = []
        if dtype is None:
            return
        # A module that is registered twice contributes every name of its buffers to state dicts.
        prefixes: dict[nn.Module, list[str]] = {}
        for prefix, module in root.named_modules(remove_duplicate=False):
            prefixes.setdefault(module, []).append(prefix)
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    paths = tuple(clean_fqn(join_fqn(prefix, name)) for prefix in prefixes[module])
                    self._buffers.append(_LowBuffer(module, name, paths, buffer.dtype))

    def cast(self, *, full: bool) -> None:
        """Cast the buffers to the compute dtype, or with ``full`` to their registered dtype."""
        self._is_low = not full
        # One tensor may be registered at several places.
        rounded: dict[torch.Tensor, torch.Tensor] = {}
        for entry in self._buffers:
            buffer = entry.module._buffers.get(entry.name)
            if buffer is None or self._dtype is None:
                continue
            if full:
                if buffer.dtype != entry.dtype:
                    buffer.data = entry.widened(buffer.data)
                entry.exact = None
            elif buffer.dtype != self._dtype:
                rounded[buffer] = entry.exact = buffer.data
                buffer.data = buffer.data.to(self._dtype)
            else:
                entry.exact = rounded.get(buffer, entry.exact)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Keep the buffers in their registered dtype inside the block; restore the previous dtype afterwards."""
        was_low = self._is_low
        self.cast(full=True)
        try:
            yield
        finally:
            self.cast(full=not was_low)

    def restore(self, destination: dict[str, Any], prefix: str) -> None:
        """Cast the buffers in a state dict to their registered dtype."""
        for entry in self._buffers:
            for name in (prefix + path for path in entry.paths):
                if name in destination:
                    destination[name] = entry.widened(destination[name])

    def remember(self, given: Mapping[str, Any], prefix: str) -> list[Callable[[], object]]:
        """Return callbacks to run after ``given`` is loaded into the buffers; they keep the values before rounding."""
        found: list[Callable[[], object]] = []
        for entry in self._buffers:
            value = next((given[prefix + path] for path in entry.paths if prefix + path in given), None)
            if isinstance(value, torch.Tensor) and not value.is_meta:
                found.append(partial(self._remember, entry, value))
        return found

    def _remember(self, entry: _LowBuffer, value: torch.Tensor) -> None:
        buffer = entry.module._buffers.get(entry.name)
        if buffer is not None and buffer.dtype == self._dtype:
            entry.exact = value.detach().to(buffer.device, entry.dtype, copy=True)


_MAX_NESTED_CALLS = 64


class _FullPrecision:
    """Casts the inputs of a module to full precision and its outputs back, with two forward hooks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # A recomputation that stops early leaves its entry, so the oldest ones are dropped.
        self._before: deque[torch.dtype | None] = deque(maxlen=_MAX_NESTED_CALLS)

    def cast_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen: list[torch.dtype] = []

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            wide = _cast(self._dtype, tensor)
            if wide is not tensor:
                seen.append(tensor.dtype)
            return wide

        cast = map_tensors((args, kwargs), widen)
        self._before.append(seen[-1] if seen else None)
        return cast

    def cast_outputs(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        original = self._before.pop() if self._before else None
        if original is None:
            return None
        return map_tensors(output, lambda tensor: tensor.to(original) if tensor.dtype == self._dtype else tensor)


def keep_full_precision(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Make ``module`` compute in ``dtype``: floating-point inputs are cast to it and outputs back.

    The hooks run after those already registered.
    """
    casts = _FullPrecision(dtype)
    module.register_forward_pre_hook(casts.cast_inputs, with_kwargs=True)
    module.register_forward_hook(casts.cast_outputs)


def drop_full_precision(module: nn.Module) -> None:
    """Undo :func:`keep_full_precision`; do nothing for other modules."""
    both: list[tuple[dict[int, Any], dict[int, bool]]] = [
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ]
    for hooks, marks in both:
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _FullPrecision)]:
            del hooks[key]
            marks.pop(key, None)
