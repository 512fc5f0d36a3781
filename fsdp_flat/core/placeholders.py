"""Guards against one rank's part of a parameter being taken for the full one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fsdp_flat.core.torch_core import unguarded, without_data
from fsdp_flat.errors import UsageError

SHARDED_HINTS = (
    "Call the wrapped model (its forward all-gathers the parameters); for another method use "
    "fsdp_flat.register_forward_method(model, name); for a block of code use fsdp_flat.unshard_for(model), which works "
    "under autograd, or summon_full_params."
)


def module_guard(describe: Callable[[nn.Module], str]) -> Callable[..., NoReturn]:
    """Create a forward pre-hook that raises, for modules with a sharded parameter that ``describe`` names."""

    def guard(module: nn.Module, _args: Any) -> NoReturn:
        raise UsageError(
            f"{type(module).__name__} was called while its parameter {describe(module)} is sharded: this rank holds "
            f"a local shard of it. {SHARDED_HINTS}"
        )

    return guard


def call_adviser(describe: Callable[[nn.Module], str]) -> Callable[..., None]:
    """Create a forward pre-hook that adds advice to torch's error about a plain tensor and a DTensor in one operation.

    It does not raise itself: an operation of DTensors alone is right, also while a unit is sharded.
    """

    def advise(module: nn.Module, _args: Any) -> None:
        def explain(_module: nn.Module, _args: Any, _output: Any) -> None:
            handle.remove()
            error = sys.exc_info()[1]
            if isinstance(error, RuntimeError) and _MIXED in str(error) and SHARDED_HINTS not in str(error):
                error.args = (
                    f"{error} {type(module).__name__} was called while its parameter {describe(module)} is sharded, "
                    f"and so a DTensor. {SHARDED_HINTS}",
                    *error.args[1:],
                )

        # It runs after this call of the module, whether that raises or not.
        handle = module.register_forward_hook(explain, always_call=True)

    return advise


# Part of torch's error.
_MIXED = "mixed torch.Tensor and DTensor"


class Placeholder(torch.Tensor):
    """Stands in for a parameter: has its attributes, and no data."""

    _trains: Callable[[], bool]

    def __repr__(self) -> str:  # type: ignore[override]
        kind = type(self).__name__
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def _like(self) -> torch.Tensor:
        """Return a tensor with these attributes and meaningless values, if it can in the memory of a scalar."""
        if self.is_contiguous():
            return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)


# Functions of a tensor that need no values, getters of attributes among them.
METADATA = frozenset(
    {"__get__", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
    | {"stride", "__hash__", "__len__", "is_contiguous", "storage_offset", "get_device", "is_signed", "is_inference"}
    | {"dim_order"}
)


def creates(name: str) -> bool:
    """Return whether a function creates a tensor of the shape, dtype and device of its first argument."""
    return name == "new" or name.startswith("new_") or name.endswith("_like")


class ShardedPlaceholder(Placeholder):
    """Replaces an original parameter in its module while it is sharded (``use_orig_params=False``).

    It has the unsharded parameter's shape, strides, dtype, device and ``requires_grad``, and no data. Its attributes
    can be read, and tensors be created like it; every operation that needs its values raises.
    """

    _describe: Callable[[], str]

    @classmethod
    def of(
        cls, like: torch.Tensor, device: torch.device, describe: Callable[[], str], trains: Callable[[], bool]
    ) -> ShardedPlaceholder:
        """Create a placeholder.

        Args:
            like: has the shape, strides and dtype.
            device: the device to show.
            describe: returns the parameter's name for error texts.
            trains: returns whether the parameter requires a gradient.
        """
        made: ShardedPlaceholder = without_data(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        made._describe, made._trains = describe, trains
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Getters are bound to the attribute, which has the name.
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        return _without_values(func, name, attribute, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # For operations that do not come by __torch_function__.
        return _without_values(func, func.overloadpacket.__name__, "", args, kwargs or {})

    def _view(self, func: Callable[[torch.Tensor], torch.Tensor]) -> ShardedPlaceholder:
        """Return the placeholder of a view, which ``func`` takes of a tensor."""
        with unguarded():
            meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            return ShardedPlaceholder.of(func(meta), self.device, self._describe, self._trains)


# Views without values too: attributes, and functions of one argument.
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "detach", "t"})
# Functions of another tensor that need a placeholder's shape, dtype or device alone.
_OF_ANOTHER = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})


def _without_values(func: Any, name: str, attribute: str, args: Any, kwargs: Any) -> Any:
    """Run a function that needs no values of a placeholder; raise a UsageError for any other function."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    values = (*args, *kwargs.values())
    found = _first_in(values)
    if isinstance(first, ShardedPlaceholder):
        if attribute == "requires_grad":
            return first._trains()
        if (attribute or name) in _VIEWS:
            return first._view(func if args else lambda tensor: func(**{**kwargs, next(iter(kwargs)): tensor}))
        if name in METADATA or (name == "type" and len(args) + len(kwargs) == 1):
            with unguarded():
                return func(*args, **kwargs)
    # Constructors use the shape, dtype and device of their first argument, and conversions those of the second one.
    needed = values[1:] if creates(name) else values[:1] if name in _OF_ANOTHER else values
    if found is not None and _first_in(needed) is None:
        args, kwargs = tree_map_only(ShardedPlaceholder, ShardedPlaceholder._like, (args, kwargs))
        return func(*args, **kwargs)
    if found is None:
        raise UsageError(f"A sharded parameter was used. {SHARDED_HINTS}")
    raise UsageError(
        f"Parameter {found._describe()} was used while it is sharded: this rank holds a local shard of the unit's "
        f"flat parameter. {SHARDED_HINTS}"
    )


def _first_in(values: Sequence[Any]) -> ShardedPlaceholder | None:
    """Return the first placeholder among the arguments of an operation, and in lists; None if there is none."""
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]
    return next((item for item in flat if isinstance(item, ShardedPlaceholder)), None)
