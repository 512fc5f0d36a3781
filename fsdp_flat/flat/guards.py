"""Errors with a name in place of shape mismatches when something is used while its unit is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_flat.errors import UsageError

__all__ = ["ModuleGuard", "ShardedStandIn"]

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
    """

    __slots__ = ("_key", "_param_fqn", "_shape", "_unit_name")

    def __init__(self, key: int, unit_name: Callable[[], str], param_fqn: str, shape: tuple[int, ...]) -> None:
        self._key = f"fsdp_flat_guard_{key}"
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
        module._forward_pre_hooks[self._key] = self  # type: ignore[index]

    def is_on(self, module: nn.Module) -> bool:
        """Whether ``module`` is guarded now."""
        return self._key in module._forward_pre_hooks

    def take(self, module: nn.Module) -> None:
        """Let ``module`` run."""
        module._forward_pre_hooks.pop(self._key, None)  # type: ignore[call-overload]


class ShardedStandIn(torch.Tensor):
    """What stands where an original parameter was while it is sharded (``use_orig_params=False``).

    It has the parameter's shape and dtype and no data; every operation on it raises.
    """

    _explain: Callable[[], str]

    @classmethod
    def of(cls, leaf: torch.Tensor, fqn: str, unit_name: Callable[[], str]) -> ShardedStandIn:
        """The stand-in for ``leaf``."""
        stand_in = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").as_subclass(cls)
        stand_in._explain = lambda: (
            f"Parameter {fqn!r} {tuple(leaf.shape)} of unit {unit_name()!r} was used while it is sharded: this rank "
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
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        found = next((item for item in flat if isinstance(item, ShardedStandIn)), None)
        raise UsageError(found._explain() if found is not None else f"A sharded parameter was used. {_WAYS_OUT}")

    def __deepcopy__(self, _memo: Any) -> ShardedStandIn:
        return self


_METADATA = frozenset(
    {"__get__", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
    | {"stride", "__repr__", "__hash__", "__format__", "__len__", "as_subclass", "type", "is_contiguous"}
)
