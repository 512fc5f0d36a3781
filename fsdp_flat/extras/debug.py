"""Checks, on request, that no operation needs the unsharded shape of a sharded parameter."""

from __future__ import annotations

import functools
import re
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp_flat.core import SHARDED_HINTS, owner_of, unsharded_shape
from fsdp_flat.errors import UsageError

# Reductions over all elements, with the position of the argument that restricts each to some dims.
_REDUCTIONS = {
    **dict.fromkeys(("sum", "mean", "prod", "std", "var", "max", "min", "amax", "amin", "median", "all", "any"), 1),
    **dict.fromkeys(("norm", "linalg_vector_norm"), 2),
}
_FLATTENING = frozenset({"view", "reshape", "flatten", "ravel", "contiguous", "view_as", "reshape_as", "expand_as"})
# Copies, moves, and operations in place that torch does not tag as pointwise.
_COPIES = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "clone", "detach", "detach_"}
    | {"share_memory_", "pin_memory", "requires_grad_", "copy_", "fill_", "zero_", "constant_"}
)
_ARITHMETIC = re.compile(
    r"__[ri]?(add|sub|mul|[a-z]*div|mod|pow|and|or|xor|[lr]shift)__|__(neg|pos|abs|invert|eq|ne|[lg][te])__"
)
_TRANSPOSED = frozenset({"T", "mT", "H", "mH"})


def debug() -> AbstractContextManager[object]:
    """Raise in this block for each operation that needs the unsharded shape of a sharded parameter.

    With ``use_orig_params=True`` a parameter outside of its unit's forward is an ordinary ``nn.Parameter`` whose data
    is this rank's local shard, 1-D. ``F.linear(x, head.weight)`` then ends in a shape mismatch, and ``weight[3]`` or
    ``softmax(weight)`` in a wrong value. Inside this block they raise a ``UsageError`` with the parameter, its unit,
    the number of its elements on this rank, and the alternatives.

    Elementwise operations, reductions over all elements, copies, conversions and inspection work; so do forwards,
    backwards, optimizer steps, clipping and averages. A 1-D parameter of which this rank holds all elements is not
    checked on this rank. The block adds time to each operation of torch in this thread.

    Returns:
        A context manager, for one ``with`` statement.

    Example::

        with fsdp_flat.debug():
            train_step(model, optimizer, batch)
    """
    return _ShapeCheck()


class _ShapeCheck(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        param = _first_sharded((*args, *kwargs.values()))
        if param is None or _is_free(func, name):
            return func(*args, **kwargs)
        elementwise = _is_elementwise(name, args, kwargs)
        if not elementwise and re.fullmatch(r"__[gs]et(item)?__|.*[^_]_", name):  # writes, or warns first (``.T``)
            _refuse(param, name)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            if elementwise and name not in _FLATTENING and _broadcast([*args, *kwargs.values()]):
                raise
            _refuse(param, name, error)
        if isinstance(result, torch.Tensor):
            if not elementwise or result.shape not in (param.shape, ()):
                _refuse(param, name)
        elif isinstance(result, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in result):
            _refuse(param, name)
        return result


def _first_sharded(given: tuple[Any, ...]) -> nn.Parameter | None:
    """Return the first sharded original parameter among arguments, and in lists of them."""
    for each in given:
        for item in each if isinstance(each, (list, tuple)) else (each,):
            is_plain = isinstance(item, nn.Parameter) and not isinstance(item, DTensor)
            if is_plain and unsharded_shape(item) not in (None, item.shape):
                return item
    return None


def _is_free(func: Any, name: str) -> bool:
    """Return whether an operation reads or sets an attribute, is an optimizer's, or makes an unrelated tensor."""
    if name == "__get__":
        return func.__self__.__name__ not in _TRANSPOSED
    is_private = name.startswith("_") and not name.startswith("__")  # ``_foreach_add_``, ``_fused_adamw_``
    return is_private or name in ("__set__", "__delete__", "view_as_real") or name.startswith("new_")


def _is_elementwise(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an operation treats each element alike; its result has the parameter's shape or no dims."""
    place = _REDUCTIONS.get(name)
    if place is None:
        return name in _COPIES or name in _FLATTENING or _is_pointwise(name)
    dims = [*args[place : place + 1], *(kwargs[key] for key in ("dim", "axis") if key in kwargs)]
    return all(dim is None or isinstance(dim, bool) for dim in dims)


@functools.cache
def _is_pointwise(name: str) -> bool:
    if name.endswith("_like") or _ARITHMETIC.fullmatch(name):
        return True
    found = [getattr(torch.ops.aten, each, None) for each in {name, name.rstrip("_")}]
    operators = [each for each in found if isinstance(each, torch._ops.OpOverloadPacket)]
    overloads = [getattr(each, form) for each in operators for form in each.overloads()]
    wanted = {torch.Tag.pointwise}
    if name.endswith("_"):
        wanted.add(torch.Tag.nondeterministic_seeded)  # ``normal_``, ``uniform_``
    return any(wanted.intersection(each.tags) for each in overloads)


def _broadcast(given: list[Any]) -> bool:
    try:
        torch.broadcast_shapes(*[each.shape for each in given if isinstance(each, torch.Tensor)])
    except RuntimeError:
        return False
    return True


def _refuse(param: nn.Parameter, used_by: str, cause: Exception | None = None) -> NoReturn:
    owner = owner_of(param)
    described = "" if owner is None else f" {owner.describe()}"
    raise UsageError(
        f"Parameter{described} was used by {used_by} while it is sharded: this rank holds {param.numel()} of its "
        f"elements. {SHARDED_HINTS}"
    ) from cause
