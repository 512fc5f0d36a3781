"""Defines the classes of sharded parameters and their guards, which name the parameter in place of a shape mismatch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_flat.errors import UsageError
from fsdp_flat.flat._torch import register_as_plain_tensor, unguarded
from fsdp_flat.flat.params import ManagedParam
from fsdp_flat.flat.sharded_grad import ShardedGrad, first_of

_HINTS = (
    "Call the wrapped model (its forward all-gathers the parameters); for another method use "
    "fsdp_flat.register_forward_method(model, name); for a block of code use fsdp_flat.unshard_for(model), which works "
    "under autograd, or summon_full_params."
)


def module_guard(describe: Callable[[nn.Module], str]) -> Callable[..., NoReturn]:
    """Create a forward pre-hook that raises, for modules with a sharded parameter that ``describe`` names."""

    def guard(module: nn.Module, _args: Any) -> NoReturn:
        raise UsageError(
            f"{type(module).__name__} was called while its parameter {describe(module)} is sharded: this rank holds "
            f"a local shard of it. {_HINTS}"
        )

    return guard


class ShardedPlaceholder(torch.Tensor):
    """Replaces an original parameter in its module while it is sharded (``use_orig_params=False``).

    It has the parameter's shape and dtype but no data; every operation on it raises.
    """

    _describe: Callable[[], str]

    @classmethod
    def of(cls, unsharded_params: Sequence[torch.Tensor], describe: Callable[[int], str]) -> list[ShardedPlaceholder]:
        """Create the placeholders of ``unsharded_params``, which ``describe`` names by their indices."""
        placeholders = []
        blanks: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        for index, each in enumerate(unsharded_params):
            kind = each.shape, each.dtype
            if kind not in blanks:
                blanks[kind] = torch.empty(each.shape, dtype=each.dtype, device="meta")
            placeholders.append(blanks[kind].as_subclass(cls))
            placeholders[-1]._describe = partial(describe, index)
        return placeholders

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METADATA:
            with unguarded():
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    # The results of ``.T`` and ``.data`` have a shape but no data either.
                    result = result.as_subclass(cls)
                    result._describe = args[0]._describe
                return result
        found = first_of(ShardedPlaceholder, args, kwargs)
        if found is None:
            raise UsageError(f"A sharded parameter was used. {_HINTS}")
        raise UsageError(
            f"Parameter {found._describe()} was used while it is sharded: this rank holds a local shard of the unit's "
            f"flat parameter. {_HINTS}"
        )

    def __deepcopy__(self, _memo: Any) -> ShardedPlaceholder:
        return self


_METADATA = frozenset(
    {"__get__", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
    | {"stride", "__repr__", "__hash__", "__format__", "__len__", "as_subclass", "type", "is_contiguous"}
)


# Attributes that are the same for a local shard and the unsharded parameter, and for every class of tensors.
_ATTRIBUTES = frozenset({"dtype", "device", "requires_grad", "is_leaf", "layout", "is_cpu", "is_cuda", "is_meta"})


class ShardedFlatParameter(nn.Parameter):
    """Marks a sharded flat parameter (``use_orig_params=False``), whose gradient is sharded too.

    No operation needs the unsharded shape of a flat parameter, so all work.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Create one; a plain Parameter if optimizers of this torch would be slow for the class."""
        return super().__new__(cls if _registered(cls) else nn.Parameter, data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__":
            return _set(func, args)
        is_read = name == "__get__"
        if is_read:
            name = getattr(func.__self__, "__name__", "")
            if name in _ATTRIBUTES:
                # Loops over parameters read these most.
                with unguarded():
                    return func(*args)
            if name == "grad":
                return _grad_of(args[0], func)
        kind = cls._kind_of(name, is_read, args, kwargs)
        if kind is _Kind.SHAPED:
            text = _explain(first_of(cls, args, kwargs), name)
            raise UsageError(text + (_NO_FULLY_SHARD if name in _SPLITS else ""))
        others = tuple(other for other in types if not issubclass(other, ShardedFlatParameter))
        if others:
            # Dispatch to the other tensor class, as beside a plain Parameter.
            return others[0].__torch_function__(func, others, args, kwargs)
        with unguarded():
            return func(*args, **kwargs) if kind is _Kind.FREE else _run(func, name, kind, args, kwargs)

    @staticmethod
    def _kind_of(_name: str, _is_read: bool, _args: Any, _kwargs: Any) -> _Kind:
        return _Kind.FREE

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # Plain: a copy belongs to no unit, unless it is copied together with its model.
        with unguarded():
            return memo.setdefault(id(self), nn.Parameter(self.data.clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Plain as well: the library's marks refer to the model.
        with unguarded():
            plain = nn.Parameter(self.data, self.requires_grad)
            plain.__dict__.update(self._own_attributes())
            return plain.__reduce_ex__(2)

    def _own_attributes(self) -> dict[str, Any]:
        return {}


class ShardedParameter(ShardedFlatParameter):
    """Marks an original parameter whose data is a local shard (``use_orig_params=True``).

    Elementwise operations (optimizers, averages, noise), reductions over all elements (norms, sums), inspection,
    copies and moves work as for any Parameter. Every other operation needs the unsharded shape and raises, since it
    would end in a shape mismatch or, worse, in a wrong value.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain Parameter for ``type(parameter)(data)``: the new one, or a copy, is no unit's local shard."""
        return nn.Parameter(data, requires_grad)

    @staticmethod
    def _kind_of(name: str, is_read: bool, args: Any, kwargs: Any) -> _Kind:
        if is_read:
            return _Kind.SHAPED if name in _TRANSPOSED else _Kind.FREE
        return _operation_kind(name, args, kwargs)

    def _own_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_fsdp_flattened"}


def set_sharded_class(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Change the class of a Parameter: ``kind`` while its data is a local shard, ``nn.Parameter`` otherwise.

    Only the class can change. With ``use_orig_params=True`` a user's Parameter stays the same object, as in FSDP1,
    because optimizers built before wrapping and every other reference hold it; ``copy.deepcopy`` of an optimizer and
    its model creates parameters as copies of those of the optimizer. A caller's own subclass stays.
    """
    is_ours = type(param) in (nn.Parameter, ShardedParameter) and type(param) is not kind
    if is_ours and (kind is nn.Parameter or _registered(kind)):
        param.__class__ = kind


@functools.cache
def _registered(kind: type[torch.Tensor]) -> bool:
    """Have optimizers treat ``kind`` as plain tensors, and disable its ``__torch_function__`` in all their steps.

    torch's hooks around steps cover all optimizers of the process; without them each operation of a step would call
    Python. Optimizers are slow for classes that are not on torch's list; return False if there is none.
    """
    _disable_in_steps()
    return register_as_plain_tensor(kind)


@functools.cache
def _disable_in_steps() -> None:
    register_optimizer_step_pre_hook(lambda *_: _set_torch_function(torch._C._disabled_torch_function_impl))
    register_optimizer_step_post_hook(lambda *_: enable_torch_function())


def _set_torch_function(function: Any) -> None:
    ShardedFlatParameter.__torch_function__ = function  # type: ignore[method-assign]


_CHECKED = ShardedFlatParameter.__dict__["__torch_function__"]


def enable_torch_function() -> None:
    """Enable the checks of sharded parameters after a step; forwards call it too: a step that raises skips its hook."""
    _set_torch_function(_CHECKED)


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """Identifies flat parameters: ``isinstance(t, FlatParameter)`` is true for every unit's flat parameter.

    As in FSDP1, callers cannot construct one.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> FlatParameter:
        raise TypeError("FlatParameter is a type to test against; units make their flat parameters themselves.")


def new_flat_parameter(shard: torch.Tensor, *, requires_grad: bool, is_sharded: bool) -> nn.Parameter:
    """Create a flat parameter with the data ``shard`` (1-D).

    ``is_sharded`` is true if optimizers hold it (``use_orig_params=False``) and other ranks hold other elements.
    """
    return _marked((ShardedFlatParameter if is_sharded else nn.Parameter)(shard, requires_grad))


def warn_of_lost_hooks(params: Sequence[ManagedParam], unit_name: str) -> None:
    """Warn if a parameter that becomes a part of a flat one has a hook for its gradient, which will not run."""
    lost = [entry.fqn for entry in params if entry.param._post_accumulate_grad_hooks]
    if lost:
        warnings.warn(
            f"Parameter {lost[0]!r} of unit {unit_name!r} has a hook from register_post_accumulate_grad_hook, which "
            "will not run: with use_orig_params=False the parameter becomes a part of a flat one, and only that gets a "
            "reduced gradient. Register the hook on the flat parameter after wrapping, or pass use_orig_params=True.",
            stacklevel=2,
        )


def replace_shard(flat_param: nn.Parameter, shard: torch.Tensor) -> None:
    """Set the data of a flat parameter, also if it was on the meta device, where ``.data =`` refuses other devices."""
    if flat_param.is_meta == shard.is_meta:
        flat_param.data = shard
    else:
        other = type(flat_param)(shard, flat_param.requires_grad)
        other.__dict__.update(flat_param.__dict__)
        torch.utils.swap_tensors(flat_param, other)


def copy_flat_parameter(flat_param: nn.Parameter, copied: nn.Parameter | None = None) -> nn.Parameter:
    """Return a flat parameter with a copy of the shard: ``copied`` if ``copy.deepcopy`` has already created one."""
    if copied is None:
        shard = flat_param.data.clone()
        # Offloaded shards are in pinned memory.
        shard = shard.pin_memory() if flat_param.data.is_pinned() else shard
        copied = nn.Parameter(shard, flat_param.requires_grad)
    set_sharded_class(copied, type(flat_param))
    return _marked(copied)


def _marked(flat_param: nn.Parameter) -> nn.Parameter:
    flat_param._is_flat_param = True  # type: ignore[attr-defined]
    flat_param._fsdp_flattened = True  # type: ignore[attr-defined]
    return flat_param


def _grad_of(param: torch.Tensor, getter: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    with unguarded():
        return ShardedGrad.of(getter(param), partial(_explain_grad, param))


def _set(setter: Callable[..., None], args: Sequence[Any]) -> None:
    """Set an attribute; a :class:`ShardedGrad` is replaced by the tensor that it aliases."""
    target, value = args
    with unguarded():
        setter(target, value.stored if isinstance(value, ShardedGrad) else value)


def _explain_grad(param: torch.Tensor) -> str:
    owner = getattr(param, "_fsdp_flattened", None)
    names = getattr(param, "_fqns", ())
    what = "a parameter" if owner is None else f"the flat parameter of {names}" if owner is True else owner.describe()
    with unguarded():
        return f"This rank holds {param.numel()} elements of the gradient of {what}"


def _run(func: Any, name: str, kind: _Kind, args: Any, kwargs: Any) -> Any:
    """Run an operation, and raise if its result does not have the local shard's shape."""
    param = first_of(ShardedParameter, args, kwargs)
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        if kind is _Kind.ELEMENTWISE and _broadcast(tensors):
            raise
        raise UsageError(_explain(param, name)) from error
    if isinstance(result, torch.Tensor) and result.shape != param.shape:
        raise UsageError(_explain(param, name))
    return result


def _broadcast(tensors: Sequence[torch.Tensor]) -> bool:
    try:
        torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
    except RuntimeError:
        return False
    return True


def _explain(param: nn.Parameter | None, used_by: str) -> str:
    owner = getattr(param, "_fsdp_flattened", None)
    if param is None or not owner:
        return f"A parameter was used by {used_by} while it is sharded. {_HINTS}"
    with unguarded():
        held = f"this rank holds {param.numel()} of its elements"
    return f"Parameter {owner.describe()} was used by {used_by} while it is sharded: {held}. {_HINTS}"


_SPLITS = frozenset({"chunk", "tensor_split", "split", "split_with_sizes", "unbind"})
_TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
_NO_FULLY_SHARD = (
    " torch's fully_shard cannot be called on modules that FullyShardedDataParallel manages, nor around them: take the "
    "wrapper away first (fsdp_flat.unwrap)."
)


class _Kind(Enum):
    """Classifies operations by whether a local shard can replace the unsharded parameter in them."""

    FREE = "looks at it, copies it, or goes over all elements in any order"
    ELEMENTWISE = "gives every element a result of its own"
    FLATTENING = "gives the elements as one dim, or raises"
    SHAPED = "needs its shape"

    __hash__ = object.__hash__


def _operation_kind(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Kind:
    """Classify the operation ``name`` (``__name__`` of a function or method of torch) with these arguments."""
    place = _DIM_ARGUMENT.get(name)
    if place is None:
        return _kind_by_name(name)
    dim = args[place] if len(args) > place else next((kwargs[key] for key in _DIM_NAMES if key in kwargs), None)
    if isinstance(dim, torch.Tensor):
        return _Kind.ELEMENTWISE  # torch.max(parameter, other)
    return _Kind.FREE if dim is None or dim is True or dim is False or dim == () else _Kind.SHAPED


@functools.cache
def _kind_by_name(name: str) -> _Kind:
    # torch's private functions are those of optimizers (``_foreach_add_``, ``_fused_adamw_``).
    if name in _FREE or name.startswith("new_") or (name.startswith("_") and not name.startswith("__")):
        return _Kind.FREE
    if name in _FLATTENING:
        return _Kind.FLATTENING
    base = name.strip("_")
    if base in _ELEMENTWISE or _is_pointwise(name) or _is_pointwise(base):
        return _Kind.ELEMENTWISE
    return _Kind.SHAPED


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
