"""Pairs objects of torch's FSDPs with those that ``install()`` puts in their places. Imports torch.distributed.fsdp.

The private functions have the names, arguments and results of ``torch.distributed.fsdp``'s ``_common_utils``,
``_traversal_utils``, ``_runtime_utils`` and ``_unshard_param_utils``. A call is dispatched by its first argument:
torch's function is called for a module that contains none of our wrappers. Our wrapper is both the FSDP state and the
module.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from fsdp_flat.compat.fsdp1_names import MIRRORED_MODULES, OURS, PEER, PRIVATE_MODULES, SUBSTITUTES, home_of
from fsdp_flat.compat.fsdp2_names import FSDP2_MODULES, FSDP2_NAMES
from fsdp_flat.compat.semi_private import FlatParamHandle
from fsdp_flat.compat.undocumented import UndocumentedMembers
from fsdp_flat.errors import UsageError
from fsdp_flat.runtime import summon_full_params
from fsdp_flat.wrap import _Policy


@dataclass(frozen=True, slots=True)
class ReplacedName:
    """Describes one name of torch's FSDPs and its replacement.

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
def entries() -> tuple[ReplacedName, ...]:
    """Pair all names of FSDP1, once, before anything is replaced."""
    # Activation checkpointing tests policies by class; a policy of torch's class must pass too.
    _Policy.register(importlib.import_module(f"{PEER}.wrap")._Policy)
    return tuple(_paired())


@functools.cache
def fsdp2_entries() -> tuple[ReplacedName, ...]:
    """Pair all names of FSDP2, once, before anything is replaced."""
    ours = vars(importlib.import_module(OURS))
    modules = [importlib.import_module(name) for name in FSDP2_MODULES]
    return tuple(
        ReplacedName(module, name, vars(module)[name], ours[name])
        for module in modules
        for name in FSDP2_NAMES
        if name in vars(module)
    )


def _paired() -> Iterator[ReplacedName]:
    either: dict[Any, Callable[..., Any]] = {}
    for suffix in (*MIRRORED_MODULES, *PRIVATE_MODULES):
        module = importlib.import_module(f"{PEER}.{suffix}" if suffix else PEER)
        for name, theirs in vars(module).items():
            home = home_of(suffix, name) if _is_of_peer(name, theirs) else None
            if home is not None:
                ours = vars(importlib.import_module(home))[name]
                if home == SUBSTITUTES and isinstance(ours, FunctionType):
                    ours = either.setdefault(theirs, _either(ours, theirs))
                yield ReplacedName(module, name, theirs, ours)


def _is_of_peer(name: str, value: Any) -> bool:
    """Return whether FSDP1 defines the object; ``*_STRATEGIES`` are plain lists and tuples, so go by name."""
    return str(getattr(value, "__module__", "")).startswith(PEER) or name.endswith("_STRATEGIES")


def _either(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours if its first argument contains one of our wrappers, else torch's."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        return (ours if isinstance(first, nn.Module) and _get_fsdp_states(first) else theirs)(*args, **kwargs)

    return call


def replacements(table: tuple[ReplacedName, ...]) -> dict[int, Any]:
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
    raise UsageError(
        f"{what} is torch's FSDP1, reached while fsdp_flat is installed through a binding that install() cannot "
        "replace (a subclass, a default argument, a container). Call fsdp_flat.install() before importing the code "
        "that made it."
    )


# -- private functions of torch, for our wrapper ----------------------------------------------------------------------


def _get_module_fsdp_state(module: nn.Module) -> UndocumentedMembers | None:
    return module if isinstance(module, UndocumentedMembers) else None


_get_module_fsdp_state_if_fully_sharded_module = _get_module_fsdp_state


def _get_fsdp_states(module: nn.Module) -> list[UndocumentedMembers]:
    return [child for child in module.modules() if isinstance(child, UndocumentedMembers)]


def _get_fsdp_states_with_modules(
    module: nn.Module,
) -> tuple[list[UndocumentedMembers], list[UndocumentedMembers]]:
    return _get_fsdp_states(module), _get_fsdp_states(module)


def _get_fsdp_root_states(module: nn.Module) -> list[UndocumentedMembers]:
    wrapper: Any = next(iter(_get_fsdp_states(module)), None)
    return [] if wrapper is None else wrapper.fsdp_modules(module, root_only=True)


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    return [handle for wrapper in _get_fsdp_states(module) for handle in wrapper._named_handles()]


def _is_fsdp_root(state: Any, module: nn.Module) -> bool:
    return bool(state.check_is_root())


def _lazy_init(state: Any, root_module: nn.Module) -> Any:
    state.check_is_root()
    return state


def _module_handle(state: UndocumentedMembers, module: nn.Module) -> FlatParamHandle | None:
    return state._handle


def _has_fsdp_params(state: UndocumentedMembers, module: nn.Module) -> bool:
    return state._has_params


def _reshard(state: UndocumentedMembers, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
    handle.reshard(free_unsharded_flat_param)


def _unshard_params_for_summon(
    module: nn.Module,
    state: UndocumentedMembers,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> AbstractContextManager[Any]:
    return summon_full_params(module, False, writeback, rank0_only, offload_to_cpu, with_grads)


_unshard_params = summon_full_params
