"""Classifies torch operations by whether a local shard can replace the unsharded parameter in them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

__all__ = ["OperationKind", "operation_kind"]


class OperationKind(Enum):
    """Classifies how an operation uses a tensor."""

    FREE = "looks at it, copies it, or goes over all elements in any order"
    ELEMENTWISE = "gives every element a result of its own"
    FLATTENING = "gives the elements as one dim, or raises"
    SHAPED = "needs its shape"

    __hash__ = object.__hash__


def operation_kind(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperationKind:
    """Classify the operation ``name`` (``__name__`` of a function or method of torch) with these arguments."""
    place = _DIM_ARGUMENT.get(name)
    if place is None:
        return _kind_by_name(name)
    dim = args[place] if len(args) > place else next((kwargs[key] for key in _DIM_NAMES if key in kwargs), None)
    if isinstance(dim, torch.Tensor):
        return OperationKind.ELEMENTWISE  # torch.max(parameter, other)
    return OperationKind.FREE if dim is None or dim is True or dim is False or dim == () else OperationKind.SHAPED


@functools.cache
def _kind_by_name(name: str) -> OperationKind:
    # torch's private functions are those of optimizers (``_foreach_add_``, ``_fused_adamw_``).
    if name in _FREE or name.startswith("new_") or (name.startswith("_") and not name.startswith("__")):
        return OperationKind.FREE
    if name in _FLATTENING:
        return OperationKind.FLATTENING
    base = name.strip("_")
    if base in _ELEMENTWISE or _is_pointwise(name) or _is_pointwise(base):
        return OperationKind.ELEMENTWISE
    return OperationKind.SHAPED


def _is_pointwise(name: str) -> bool:
    operator = getattr(torch.ops.aten, name, None)
    if not isinstance(operator, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.pointwise in getattr(operator, form).tags for form in operator.overloads())


_DIM_NAMES = ("dim", "axis", "other")
# Reductions over all elements, with the position of the argument that restricts each to some dims.
_DIM_ARGUMENT = {
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "prod", "max", "min", "amax", "amin", "median"), 1),
    **dict.fromkeys(("all", "any", "std", "var", "std_mean", "var_mean", "count_nonzero"), 1),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "quantile", "nanquantile"), 2),
}
# Elementwise operations, or ones that overwrite every element, that torch does not tag as pointwise.
_ELEMENTWISE = frozenset(
    {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "exponential", "random", "cauchy", "log_normal"}
    | {"geometric", "constant", "isclose", "absolute", "negative", "positive", "multiply", "divide", "subtract"}
    | {"true_divide", "floor_divide", "greater", "greater_equal", "less", "less_equal", "not_equal", "real", "imag"}
    | {"conj", "resolve_conj", "resolve_neg", "trunc_normal", "logaddexp", "pos", "and", "or", "xor", "invert"}
    | {"iand", "ior", "ixor", "rand", "ror", "rxor", "mod", "rmod", "floordiv", "rfloordiv", "ifloordiv", "truediv"}
    | {"rtruediv", "itruediv", "div", "rdiv", "idiv", "lshift", "rshift", "ilshift", "irshift", "rsub", "rpow"}
)
_FLATTENING = frozenset(
    {"view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "expand_as", "contiguous", "squeeze"}
)
_FREE = frozenset(
    # Inspection.
    {"size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr"}
    | {"storage", "untyped_storage", "storage_type", "get_device", "is_contiguous", "is_floating_point", "is_complex"}
    | {"is_signed", "is_inference", "is_pinned", "is_shared", "is_same_size", "is_set_to", "is_nonzero", "is_coalesced"}
    | {"is_conj", "is_neg", "is_distributed", "is_tensor", "result_type", "can_cast", "has_names", "dense_dim"}
    | {"__len__", "__repr__", "__format__", "__hash__", "__dir__", "__bool__", "__int__", "__float__", "__complex__"}
    | {"item", "tolist", "numpy", "__array__", "__dlpack__", "__dlpack_device__", "histc", "histogram", "unique"}
    | {"dist"}
    | {"equal", "allclose", "aminmax", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward"}
    # Copies, moves and assignment.
    | {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool"}
    | {"cpu", "cuda", "xpu", "ipu", "npu", "clone", "detach", "detach_", "alias", "as_subclass", "pin_memory"}
    | {"share_memory_", "record_stream", "requires_grad_", "set_", "apply_", "map_", "__delete__"}
    | {"__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__", "view_as_real"}
    | {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
    # Collectives and p2p.
    | {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "send", "recv", "isend", "irecv"}
    | {"all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter", "all_to_all"}
)
