"""Maps each object of torch's FSDP1 to its counterpart in fsdp_flat. Importing this imports torch.distributed.fsdp."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch.distributed.fsdp
from torch import nn

from fsdp_flat import errors
from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_flat.wrap import _Policy

__all__ = ["PEER", "Fsdp1Name", "entries", "guarded_init"]

PEER = torch.distributed.fsdp.__name__

# By suffix of torch's module, our module with the counterparts of its names. Only names in both are replaced, so that
# names that torch's module merely imports (and FSDP2, which is in the package itself) stay unchanged.
_COUNTERPARTS = {
    "": "fsdp_flat",
    ".api": "fsdp_flat.api",
    ".fully_sharded_data_parallel": "fsdp_flat.fully_sharded_data_parallel",
    ".sharded_grad_scaler": "fsdp_flat.sharded_grad_scaler",
    ".wrap": "fsdp_flat.wrap",
    "._wrap_utils": "fsdp_flat.wrap",
    "._flat_param": "fsdp_flat.fully_sharded_data_parallel",
    "._init_utils": "fsdp_flat.semi_private",
}
# Modules whose functions take wrappers of torch or ours: a call is dispatched by its first argument.
_SHARED = ("._common_utils", "._traversal_utils", "._runtime_utils", "._unshard_param_utils")


@dataclass(frozen=True, slots=True)
class Fsdp1Name:
    """Describes one name of torch's FSDP1 and its replacement.

    Attributes:
        module: the module of torch that clients import it from.
        name: its name in that module.
        theirs: torch's object.
        ours: the object that replaces it.
    """

    module: ModuleType
    name: str
    theirs: Any
    ours: Any


@functools.cache
def entries() -> tuple[Fsdp1Name, ...]:
    """Build the table of all names, once, before anything is replaced."""
    # Activation checkpointing tests policies by class; a policy of torch's class must pass too.
    _Policy.register(importlib.import_module(f"{PEER}.wrap")._Policy)
    return tuple(_public_entries()) + tuple(_shared_entries())


def _public_entries() -> Iterator[Fsdp1Name]:
    for suffix, counterpart in _COUNTERPARTS.items():
        module, mine = importlib.import_module(PEER + suffix), importlib.import_module(counterpart)
        for name, theirs in vars(module).items():
            ours = vars(mine).get(name)
            if ours is not None and _is_of_peer(name, theirs):
                yield Fsdp1Name(module, name, theirs, ours)


def _is_of_peer(name: str, value: Any) -> bool:
    """Return whether FSDP1 defines the object; ``*_STRATEGIES`` are plain lists and tuples, so go by name."""
    return str(getattr(value, "__module__", "")).startswith(PEER) or name.endswith("_STRATEGIES")


def _shared_entries() -> Iterator[Fsdp1Name]:
    private = importlib.import_module("fsdp_flat.compat.private_names")
    plain = importlib.import_module("fsdp_flat.fully_sharded_data_parallel")
    names = importlib.import_module("fsdp_flat.extras.names")
    either: dict[Any, Callable[..., Any]] = {}
    for suffix in _SHARED:
        module = importlib.import_module(PEER + suffix)
        for name, theirs in vars(module).items():
            if name in private.__all__:
                ours = either.setdefault(theirs, _either(vars(private)[name], theirs))
            elif name in ("TrainingState", "HandleTrainingState", "FlatParamHandle"):
                ours = vars(plain)[name]
            elif name == "clean_tensor_name":
                ours = names.clean_tensor_name
            else:
                continue
            yield Fsdp1Name(module, name, theirs, ours)


def _either(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours if its first argument contains one of our wrappers, else torch's."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        is_ours = isinstance(first, nn.Module) and any(
            isinstance(module, FullyShardedDataParallel) for module in first.modules()
        )
        return (ours if is_ours else theirs)(*args, **kwargs)

    return call


def replacements(table: tuple[Fsdp1Name, ...]) -> dict[int, Any]:
    """Return ``{id(torch's object): ours}``, including the members of enums."""
    found: dict[int, Any] = {}
    for entry in table:
        found[id(entry.theirs)] = entry.ours
        if isinstance(entry.theirs, type) and issubclass(entry.theirs, Enum):
            for member in entry.theirs:
                found[id(member)] = entry.ours[member.name]
    return found


def guarded_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace torch's constructor while fsdp_flat is installed, to prevent mixing the two by accident.

    Raises:
        UsageError: always.
    """
    kind = type(self)
    what = f"{kind.__module__}.{kind.__qualname__}"
    raise errors.UsageError(
        f"{what} is torch's FSDP1, reached while fsdp_flat is installed through a binding that install() cannot "
        "replace (a subclass, a default argument, a container). Call fsdp_flat.install() before importing the code "
        "that made it."
    )
