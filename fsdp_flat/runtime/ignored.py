"""Resolves the modules and parameters that the caller excludes from sharding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError, TiedParameterError
from fsdp_flat.flat import FlattenedBy, named_sites
from fsdp_flat.runtime.options import Ignored
from fsdp_flat.runtime.unit import unit_of, units_of
from fsdp_flat.user_warnings import warn_user


def resolve_ignored(root: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Validate the two arguments and expand modules to their subtrees.

    Nested units inside an ignored module stay units. Everything that nested units ignore is ignored here too.

    Args:
        root: the module being wrapped.
        ignored_modules: an iterable of modules, or None.
        ignored_states: an iterable of parameters, or one of modules, or None.

    Raises:
        OptionError: both are given, modules and parameters are mixed, or a wrapped module is among them.
        OptionTypeError: an argument is not iterable.
        TiedParameterError: an ignored module shares a parameter with one that was wrapped before.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise OptionError(
            "ignored_modules and ignored_states were both given (an empty list counts). Pass ignored_states alone; it "
            "takes modules or parameters."
        )
    modules = _listed("ignored_modules", ignored_modules)
    states = _listed("ignored_states", ignored_states)
    if not all(isinstance(entry, nn.Module) for entry in modules):
        raise OptionError(f"ignored_modules must hold nn.Modules only; got {_kinds(modules)}.")
    params: list[nn.Parameter] = []
    if states and all(isinstance(entry, nn.Module) for entry in states):
        modules = states
    elif all(isinstance(entry, nn.Parameter) for entry in states):
        params = states
    else:
        raise OptionError(
            f"ignored_states must hold parameters only, or modules only; got {_kinds(states)}. "
            "For parameters of several modules pass the parameters."
        )
    for module in modules:
        if unit_of(module) is not None:
            raise OptionError(
                f"An ignored module is wrapped by FullyShardedDataParallel already: {type(module).__name__}."
            )
        if module is root:
            warn_user(
                "The module being wrapped is itself in the ignored set, so nothing of it will be sharded.", stacklevel=5
            )
    subtree = {child for module in modules for child in _outside_units(module)}
    _check_ties(root, subtree)
    inherited = [unit.ignored for unit in units_of(root)]
    return Ignored(
        frozenset(subtree.union(*[entry.modules for entry in inherited])),
        frozenset(
            {param for module in subtree for param in module.parameters(recurse=False)}.union(params).union(
                *[entry.params for entry in inherited]
            )
        ),
    )


def _check_ties(root: nn.Module, ignored: set[nn.Module]) -> None:
    if not ignored:
        return
    for site, param in named_sites(root):
        owner = getattr(param, "_fsdp_flattened", None)
        if site.module in ignored and isinstance(owner, FlattenedBy):
            raise TiedParameterError(
                f"{site.fqn!r} of an ignored module is the same parameter as {owner.describe()}, which was wrapped "
                "before and holds a part of it now, so the tie would be cut. Ignore the parameter when that unit is "
                "wrapped too (ignored_states=[parameter]), or do not ignore the module."
            )


def _outside_units(module: nn.Module) -> Iterable[nn.Module]:
    if unit_of(module) is not None:
        return
    yield module
    for child in module.children():
        yield from _outside_units(child)


def _listed(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    try:
        return list(value)
    except TypeError:
        raise OptionTypeError(f"{name} must be an iterable; got {type(value).__name__}.") from None


def _kinds(entries: list[Any]) -> str:
    return ", ".join(sorted({type(entry).__name__ for entry in entries}))
