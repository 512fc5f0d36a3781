"""Converts arguments of the constructors to the settings of units, or says what is wrong with them."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fsdp_flat.api import CPUOffload, MixedPrecision, flag, is_a
from fsdp_flat.core.options import Precision, SyncStates
from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def listed(name: str, value: Any, is_valid: Callable[[Any], bool], what: str) -> list[Any]:
    """Return an argument that holds several values as a list; raise an OptionTypeError if it, or one, is not valid."""
    wrong = [value]
    with suppress(TypeError):
        found = list(value)
        wrong = [each for each in found if not is_valid(each)]
    if wrong:
        raise OptionTypeError(f"{name} must hold {what}; got {wrong[0]!r}.")
    return found


def _shown(value: object) -> str:
    """Return an argument of a wrong type for an error text: one of a built-in type itself, of another its class."""
    kind = type(value)
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def with_known_arguments(function: _Function) -> _Function:
    """Have a function, the constructor or ``fully_shard``, name what it takes if it is called with another keyword."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := sorted(kwargs.keys() - set(known)):
            raise OptionTypeError(
                f"{function.__qualname__.removesuffix('.__init__')} has no argument {unknown[0]!r}; it takes "
                f"{', '.join(known)}. Section 'From the wrapper to fully_shard' of docs/migrating.md has the arguments "
                "of both."
            )
        return function(*args, **kwargs)

    return cast(_Function, call)


def check_callable(name: str, value: object) -> None:
    """Raise an OptionTypeError if an argument cannot be called."""
    if not callable(value):
        raise OptionTypeError(f"{name} must be callable; got {value!r}.")


def _check_dtypes(value: Any, *names: str) -> None:
    for name in names:
        dtype = getattr(value, name, None)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            kind = "MixedPrecision" if is_a(value, "MixedPrecision") else "MixedPrecisionPolicy"
            raise OptionTypeError(
                f"{kind}.{name} must be a torch.dtype or None; got {dtype!r}. For example {name}=torch.bfloat16."
            )


def precision_of_policy(policy: Any) -> Precision:
    """Convert a ``MixedPrecisionPolicy`` of ``fully_shard`` (ours or torch's) to a :class:`Precision`."""
    if not is_a(policy, "MixedPrecisionPolicy"):
        raise OptionTypeError(
            f"mp_policy must be a MixedPrecisionPolicy; got {_shown(policy)}. For example "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."
        )
    _check_dtypes(policy, "param_dtype", "reduce_dtype", "output_dtype")
    # A field of torch's class since 2.15.
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise UnsupportedError(
            "MixedPrecisionPolicy.param_dtype_override_fn is not supported: parameters of one call have one dtype in "
            "compute. Call fully_shard with another mp_policy on the modules that hold the others."
        )
    reduce_dtype = policy.reduce_dtype or policy.param_dtype
    return Precision(policy.param_dtype, reduce_dtype, policy.cast_forward_inputs, output_dtype=policy.output_dtype)


def precision_from(value: Any) -> Precision:
    """Convert a ``MixedPrecision`` (ours or torch's) or None to a :class:`Precision`."""
    value = MixedPrecision() if value is None else value
    if not (is_a(value, "MixedPrecision") and hasattr(value, "cast_root_forward_inputs")):
        raise OptionTypeError(
            f"mixed_precision must be a MixedPrecision; got {_shown(value)}. For example "
            "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."
        )
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "master_dtype")
    _check_dtypes(value, *names)
    for name in names:
        dtype = getattr(value, name, None)
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(f"MixedPrecision.{name} must be a floating-point dtype; got {dtype}.")
    # torch's class has no fields of these three names. A single class or name stands for a set of it.
    full, uncast = getattr(value, "full_precision_modules", ()), getattr(value, "uncast_inputs", ())
    full, uncast = [full] if isinstance(full, type) else full, [uncast] if isinstance(uncast, str) else uncast
    full = listed(
        "MixedPrecision.full_precision_modules",
        full,
        lambda kind: isinstance(kind, type) and issubclass(kind, nn.Module),
        "module classes",
    )
    uncast = listed("MixedPrecision.uncast_inputs", uncast, lambda name: isinstance(name, str), "names of arguments")
    # Its classes may be of other kinds that modules inherit from.
    ignored = listed(
        "MixedPrecision._module_classes_to_ignore",
        value._module_classes_to_ignore,
        lambda kind: isinstance(kind, type),
        "classes",
    )
    return Precision(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype or value.param_dtype,
        buffer_dtype=value.buffer_dtype,
        keep_low_precision_grads=flag(value.keep_low_precision_grads, "MixedPrecision.keep_low_precision_grads"),
        cast_forward_inputs=flag(value.cast_forward_inputs, "MixedPrecision.cast_forward_inputs"),
        cast_root_forward_inputs=flag(value.cast_root_forward_inputs, "MixedPrecision.cast_root_forward_inputs"),
        master_dtype=getattr(value, "master_dtype", None),
        full_precision_modules=tuple(full),
        uncast_inputs=frozenset(uncast),
        full_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1",
        ignored_classes=tuple(ignored),
    )


def sync_states_from(value: object) -> SyncStates:
    """Convert ``sync_module_states``, True, False, "auto" or "raise", to an action."""
    if value is None or isinstance(value, int):
        return "broadcast" if value else "warn"
    if value in ("auto", "raise"):
        return value
    raise OptionError(f'sync_module_states must be True, False, "auto" or "raise"; got {value!r}.')


def cpu_offload_from(value: Any) -> CPUOffload:
    """Return a ``CPUOffload`` (ours or torch's), or ours for None."""
    value = CPUOffload() if value is None else value
    if not is_a(value, "CPUOffload"):
        raise OptionTypeError(
            f"cpu_offload must be a CPUOffload; got {_shown(value)}. For example "
            "cpu_offload=CPUOffload(offload_params=True)."
        )
    return value
