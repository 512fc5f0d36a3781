"""Guards against one rank's part of a parameter being taken for the full one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.flat.torch_flat import unguarded

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
            raise UsageError(f"A sharded parameter was used. {SHARDED_HINTS}")
        raise UsageError(
            f"Parameter {found._describe()} was used while it is sharded: this rank holds a local shard of the unit's "
            f"flat parameter. {SHARDED_HINTS}"
        )


_METADATA = frozenset(
    {"__get__", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
    | {"stride", "__repr__", "__hash__", "__format__", "__len__", "as_subclass", "type", "is_contiguous"}
)


def first_of(kind: type[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Return the first argument of a class among the arguments of an operation, and in lists; None if there is none."""
    if args and isinstance(args[0], kind):
        return args[0]
    given = [*args, *(kwargs or {}).values()]
    flat = [item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next((item for item in flat if isinstance(item, kind)), None)
