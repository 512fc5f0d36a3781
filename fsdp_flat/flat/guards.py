"""Errors with a name in place of shape mismatches when something is used while its unit is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.flat import _torch
from fsdp_flat.flat.operations import OperationKind, operation_kind
from fsdp_flat.flat.sharded_grad import ShardedGrad

__all__ = ["ModuleGuard", "ShardedFlatParameter", "ShardedParameter", "ShardedPlaceholder", "unguarded"]

_WAYS_OUT = (
    "Call the wrapped model (its forward gathers the parameters); for another method use "
    "fsdp_flat.register_forward_method(model, name); for a block of code use fsdp_flat.unshard_for(model), which works "
    "under autograd, or summon_full_params."
)


class ModuleGuard:
    """A forward pre-hook that is in place while a module's parameters are sharded, and raises.

    Args:
        key: distinguishes the guards of several units on one module.
        unit_name: returns the unit's name.
        param_fqn: a parameter of the module that is sharded now.
        shape: its whole shape.

    Attributes:
        key: that of the hook.
    """

    __slots__ = ("_param_fqn", "_shape", "_unit_name", "key")

    def __init__(self, key: int, unit_name: Callable[[], str], param_fqn: str, shape: tuple[int, ...]) -> None:
        self.key = f"fsdp_flat_guard_{key}"
        self._unit_name = unit_name
        self._param_fqn = param_fqn
        self._shape = shape

    def __call__(self, module: nn.Module, _args: Any) -> NoReturn:
        raise UsageError(
            f"{type(module).__name__} was called while its parameter {self._param_fqn!r} {self._shape} of unit "
            f"{self._unit_name()!r} is sharded: this rank holds a slice of it. {_WAYS_OUT}"
        )

    def put(self, module: nn.Module) -> None:
        """Guard ``module`` from now on."""
        module._forward_pre_hooks[self.key] = self  # type: ignore[index]

    def is_on(self, module: nn.Module) -> bool:
        """Whether ``module`` is guarded now."""
        return self.key in module._forward_pre_hooks

    def take(self, module: nn.Module) -> None:
        """Let ``module`` run."""
        module._forward_pre_hooks.pop(self.key, None)  # type: ignore[call-overload]


class ShardedPlaceholder(torch.Tensor):
    """What stands where an original parameter was while it is sharded (``use_orig_params=False``).

    It has the parameter's shape and dtype and no data; every operation on it raises.
    """

    _explain: Callable[[], str]

    @classmethod
    def of(cls, unsharded_param: torch.Tensor, fqn: str, unit_name: Callable[[], str]) -> ShardedPlaceholder:
        """The placeholder for ``unsharded_param``."""
        stand_in = torch.empty(unsharded_param.shape, dtype=unsharded_param.dtype, device="meta").as_subclass(cls)
        stand_in._explain = lambda: (
            f"Parameter {fqn!r} {tuple(unsharded_param.shape)} of unit {unit_name()!r} was used while it is sharded: this rank "
            f"holds a slice of the unit's flat parameter. {_WAYS_OUT}"
        )
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    # ``.T``, ``.data``: what they give has a shape too, and no data either.
                    result = result.as_subclass(cls)
                    result._explain = args[0]._explain
                return result
        found = _first(ShardedPlaceholder, args, kwargs)
        raise UsageError(found._explain() if found is not None else f"A sharded parameter was used. {_WAYS_OUT}")

    def __deepcopy__(self, _memo: Any) -> ShardedPlaceholder:
        return self


_METADATA = frozenset(
    {"__get__", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
    | {"stride", "__repr__", "__hash__", "__format__", "__len__", "as_subclass", "type", "is_contiguous"}
)


class ShardedParameter(nn.Parameter):
    """The class of an original parameter while its data is a slice (``use_orig_params=True``).

    What works element by element (optimizers, averages, noise) or over all elements (norms, sums) is as with any
    Parameter, and so is what looks at it, copies or moves it. Every other operation needs the parameter in its shape
    and raises, where it would end in a shape mismatch or, worse, in a wrong number. Only a Parameter's class changes,
    never the object. Inside an optimizer's step nothing is looked at, so it costs the same.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """``type(parameter)(data)``, as some code makes new ones: what is made is nobody's slice."""
        return nn.Parameter(data, requires_grad)

    @staticmethod
    def guard(param: nn.Parameter) -> None:
        """``param`` holds a slice from now on. A caller's own subclass is left as it is."""
        if type(param) is nn.Parameter and _torch.take_as_plain(ShardedParameter):
            param.__class__ = ShardedParameter

    @staticmethod
    def unguard(param: nn.Parameter) -> None:
        """``param`` is whole from now on."""
        if type(param) is ShardedParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name == "grad":
                return _grad_of(args[0], func)
            use = OperationKind.SHAPED if name in _TRANSPOSED else OperationKind.FREE
        elif name == "__set__":
            return _set(func, args)
        else:
            use = operation_kind(name, args, kwargs)
        if use is OperationKind.SHAPED:
            param = _first(ShardedParameter, args, kwargs)
            raise UsageError(_explain(param, name) + (_NO_FULLY_SHARD if name in _SPLITS else ""))
        others = tuple(kind for kind in types if kind is not ShardedParameter)
        if others:
            # Another class of tensors has the say, as it would beside a plain Parameter.
            return others[0].__torch_function__(func, others, args, kwargs)
        if use is OperationKind.FREE:
            with unguarded():
                return func(*args, **kwargs)
        return _run(func, name, use, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # A copy is nobody's slice: it stays the tensor that it is.
        if id(self) not in memo:
            with unguarded():
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, {name: value for name, value in vars(self).items() if name != "_fsdp_flattened"})


class ShardedFlatParameter(nn.Parameter):
    """The class of a flat parameter that is a part of one (``use_orig_params=False``); its gradient is a part too.

    A flat parameter has no shape that an operation could need, so all work. Inside an optimizer's step nothing is
    looked at.
    """

    @classmethod
    def of(cls, shard: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """A flat parameter whose data is ``shard``."""
        return cls.guard(nn.Parameter(shard, requires_grad=requires_grad))

    @classmethod
    def guard(cls, param: nn.Parameter) -> nn.Parameter:
        """``param`` is a part of a flat parameter from now on."""
        # Without torch's list of classes optimizers would be slow.
        if type(param) is nn.Parameter and _torch.take_as_plain(cls):
            param.__class__ = cls
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # As with an original parameter: a copy belongs to no unit, unless it is copied together with its model.
        if id(self) not in memo:
            with unguarded():
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "grad":
            return _grad_of(args[0], func)
        if name == "__set__":
            return _set(func, args)
        others = tuple(kind for kind in types if kind is not ShardedFlatParameter)
        if others:
            return others[0].__torch_function__(func, others, args, kwargs or {})
        with unguarded():
            return func(*args, **(kwargs or {}))


def _reduced(param: nn.Parameter, state: dict[str, Any]) -> Any:
    """What pickles a plain parameter of the same data; marks that the library needs would refer to the model."""
    with unguarded():
        plain = nn.Parameter(param.data, param.requires_grad)
        plain.__dict__.update(state)
        return plain.__reduce_ex__(2)


def _grad_of(param: torch.Tensor, getter: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    with unguarded():
        return ShardedGrad.of(getter(param), partial(_explain_grad, param))


def _set(setter: Callable[..., None], args: Sequence[Any]) -> None:
    """Sets an attribute; a gradient that was read is stored as the tensor that it is an alias of."""
    target, value = args
    with unguarded():
        setter(target, value.stored if isinstance(value, ShardedGrad) else value)


def _explain_grad(param: torch.Tensor) -> str:
    owner = getattr(param, "_fsdp_flattened", None)
    names = getattr(param, "_fqns", ())
    what = "a parameter" if owner is None else f"the flat parameter of {names}" if owner is True else owner.describe()
    with unguarded():
        return f"This rank holds {param.numel()} elements of the gradient of {what}"


def _run(func: Any, name: str, use: OperationKind, args: Any, kwargs: Any) -> Any:
    """Runs an operation that is to give a result of the slice's shape, and raises where it does not."""
    with unguarded():
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
            if use is OperationKind.ELEMENTWISE and _broadcast(tensors):
                raise
            raise UsageError(_explain(_first(ShardedParameter, args, kwargs), name)) from error
        param = _first(ShardedParameter, args, kwargs)
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
        return f"A parameter was used by {used_by} while it is sharded. {_WAYS_OUT}"
    with unguarded():
        held = f"this rank holds {param.numel()} of its elements"
    return f"Parameter {owner.describe()} was used by {used_by} while it is sharded: {held}. {_WAYS_OUT}"


def _first(kind: type[torch.Tensor], args: Any, kwargs: Any) -> Any:
    if args and isinstance(args[0], kind):
        return args[0]
    given = [*args, *(kwargs or {}).values()]
    flat = [item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next((item for item in flat if isinstance(item, kind)), None)


unguarded = torch._C.DisableTorchFunctionSubclass
"""Context in which sharded parameters are looked at without a detour, for the library's own work on them."""

_SPLITS = frozenset({"chunk", "tensor_split", "split", "split_with_sizes", "unbind"})
_TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
_NO_FULLY_SHARD = (
    " torch's fully_shard cannot be called on modules that FullyShardedDataParallel manages, nor around them: take the "
    "wrapper away first (fsdp_flat.unwrap)."
)
