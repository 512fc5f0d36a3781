"""Raises errors that name the parameter, in place of shape mismatches, when a sharded parameter is used."""

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

_HINTS = (
    "Call the wrapped model (its forward gathers the parameters); for another method use "
    "fsdp_flat.register_forward_method(model, name); for a block of code use fsdp_flat.unshard_for(model), which works "
    "under autograd, or summon_full_params."
)


class ModuleGuard:
    """Raises as a forward pre-hook while a module's parameters are sharded.

    Args:
        key: distinguishes the guards of several units on one module.
        unit_name: returns the unit's name.
        param_fqn: FQN of a sharded parameter of the module.
        shape: its unsharded shape.

    Attributes:
        key: key of the hook.
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
            f"{self._unit_name()!r} is sharded: this rank holds a local shard of it. {_HINTS}"
        )

    def put(self, module: nn.Module) -> None:
        """Register the guard on ``module``."""
        module._forward_pre_hooks[self.key] = self  # type: ignore[index]

    def is_on(self, module: nn.Module) -> bool:
        """Return whether the guard is registered on ``module``."""
        return self.key in module._forward_pre_hooks

    def take(self, module: nn.Module) -> None:
        """Remove the guard from ``module``."""
        module._forward_pre_hooks.pop(self.key, None)  # type: ignore[call-overload]


class ShardedPlaceholder(torch.Tensor):
    """Replaces an original parameter in its module while it is sharded (``use_orig_params=False``).

    It has the parameter's shape and dtype but no data; every operation on it raises.
    """

    _explain: Callable[[], str]

    @classmethod
    def of(cls, unsharded_param: torch.Tensor, fqn: str, unit_name: Callable[[], str]) -> ShardedPlaceholder:
        """Create the placeholder for ``unsharded_param``."""
        placeholder = torch.empty(unsharded_param.shape, dtype=unsharded_param.dtype, device="meta").as_subclass(cls)
        placeholder._explain = lambda: (
            f"Parameter {fqn!r} {tuple(unsharded_param.shape)} of unit {unit_name()!r} was used while it is sharded: "
            f"this rank holds a local shard of the unit's flat parameter. {_HINTS}"
        )
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    # The results of ``.T`` and ``.data`` have a shape but no data either.
                    result = result.as_subclass(cls)
                    result._explain = args[0]._explain
                return result
        found = _first(ShardedPlaceholder, args, kwargs)
        raise UsageError(found._explain() if found is not None else f"A sharded parameter was used. {_HINTS}")

    def __deepcopy__(self, _memo: Any) -> ShardedPlaceholder:
        return self


_METADATA = frozenset(
    {"__get__", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
    | {"stride", "__repr__", "__hash__", "__format__", "__len__", "as_subclass", "type", "is_contiguous"}
)


class ShardedParameter(nn.Parameter):
    """Marks an original parameter whose data is a local shard (``use_orig_params=True``).

    Elementwise operations (optimizers, averages, noise), reductions over all elements (norms, sums), inspection,
    copies and moves work as for any Parameter. Every other operation needs the unsharded shape and raises, since it
    would end in a shape mismatch or, worse, in a wrong value. Only the Parameter's class changes, never the object.
    Inside an optimizer's step the checks are disabled, so a step costs the same.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain Parameter for ``type(parameter)(data)``: the new one is not a local shard."""
        return nn.Parameter(data, requires_grad)

    @staticmethod
    def guard(param: nn.Parameter) -> None:
        """Give ``param``, which now holds a local shard, this class; a caller's own subclass stays."""
        if type(param) is nn.Parameter and _torch.register_as_plain_tensor(ShardedParameter):
            param.__class__ = ShardedParameter

    @staticmethod
    def unguard(param: nn.Parameter) -> None:
        """Give ``param``, which is now unsharded, its class back."""
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
            # Dispatch to the other tensor class, as beside a plain Parameter.
            return others[0].__torch_function__(func, others, args, kwargs)
        if use is OperationKind.FREE:
            with unguarded():
                return func(*args, **kwargs)
        return _run(func, name, use, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _copied_plain(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, {name: value for name, value in vars(self).items() if name != "_fsdp_flattened"})


class ShardedFlatParameter(nn.Parameter):
    """Marks a sharded flat parameter (``use_orig_params=False``), whose gradient is sharded too.

    No operation needs the unsharded shape of a flat parameter, so all work. Inside an optimizer's step the checks are
    disabled.
    """

    @classmethod
    def of(cls, shard: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Create a flat parameter whose data is ``shard``."""
        return cls.guard(nn.Parameter(shard, requires_grad=requires_grad))

    @classmethod
    def guard(cls, param: nn.Parameter) -> nn.Parameter:
        """Mark ``param`` as a part of a flat parameter."""
        # Optimizers are slow for classes that are not on torch's list of plain tensors.
        if type(param) is nn.Parameter and _torch.register_as_plain_tensor(cls):
            param.__class__ = cls
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _copied_plain(self, memo)

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


def _copied_plain(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copy ``param`` as a plain Parameter: a copy belongs to no unit, unless it is copied together with its model."""
    if id(param) not in memo:
        with unguarded():
            memo[id(param)] = nn.Parameter(param.data.clone(), param.requires_grad)
    return memo[id(param)]


def _reduced(param: nn.Parameter, state: dict[str, Any]) -> Any:
    """Reduce ``param`` for pickle to a plain parameter of the same data; the library's marks refer to the model."""
    with unguarded():
        plain = nn.Parameter(param.data, param.requires_grad)
        plain.__dict__.update(state)
        return plain.__reduce_ex__(2)


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


def _run(func: Any, name: str, use: OperationKind, args: Any, kwargs: Any) -> Any:
    """Run an operation, and raise if its result does not have the local shard's shape."""
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
        return f"A parameter was used by {used_by} while it is sharded. {_HINTS}"
    with unguarded():
        held = f"this rank holds {param.numel()} of its elements"
    return f"Parameter {owner.describe()} was used by {used_by} while it is sharded: {held}. {_HINTS}"


def _first(kind: type[torch.Tensor], args: Any, kwargs: Any) -> Any:
    if args and isinstance(args[0], kind):
        return args[0]
    given = [*args, *(kwargs or {}).values()]
    flat = [item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next((item for item in flat if isinstance(item, kind)), None)


unguarded = torch._C.DisableTorchFunctionSubclass
"""Context that disables the checks of sharded parameters, for the library's own operations on them."""

_SPLITS = frozenset({"chunk", "tensor_split", "split", "split_with_sizes", "unbind"})
_TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
_NO_FULLY_SHARD = (
    " torch's fully_shard cannot be called on modules that FullyShardedDataParallel manages, nor around them: take the "
    "wrapper away first (fsdp_flat.unwrap)."
)
