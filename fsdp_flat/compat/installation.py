"""Implements ``install()``, which makes the names of torch's FSDPs resolve to fsdp_flat's, in all imported code.

Private functions of torch are replaced by functions that choose by their arguments: ours, or an error, where one holds
an object of ours (``private_names``), else torch's. ``torch.distributed.fsdp`` is imported by ``install()`` only.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import process
from types import ModuleType
from typing import Any

from fsdp_flat.compat import client_gates, private_functions
from fsdp_flat.compat.private_names import JOINED, RAISES, WORKS
from fsdp_flat.compat.torch_names import (
    FSDP2_MODULES,
    FSDP2_NAMES,
    MIRRORED_MODULES,
    OURS,
    PEER,
    PRIVATE_MODULES,
    home_of,
    is_inside,
)
from fsdp_flat.errors import UsageError, counted
from fsdp_flat.guards.torch_functions import namespaces
from fsdp_flat.wrap import _Policy


@dataclass(frozen=True, slots=True)
class Installation:
    """Reports the changes made by :func:`install`; ``str`` lists them, one line per module.

    Attributes:
        replaced: (module, name) of each replaced name, those in torch's modules first.
        left: subclasses of torch's wrapper that were defined before; constructing one raises an error.
        fully_shard: FSDP2's names are replaced too.
    """

    replaced: tuple[tuple[str, str], ...]
    left: tuple[str, ...]
    fully_shard: bool = False

    def __str__(self) -> str:
        modules: dict[str, list[str]] = {}
        for module, name in self.replaced:
            modules.setdefault(module, []).append(name)
        lines = [f"{counted(len(self.replaced), 'names')} in {counted(len(modules), 'modules')} are fsdp_flat's now:"]
        lines += [f"  {module}: {', '.join(names)}" for module, names in modules.items()]
        if self.left:
            lines.append(f"made of torch's FSDP1 before, and unusable until uninstall(): {', '.join(self.left)}")
        return "\n".join(lines)

    def __reduce__(self) -> Any:
        """Unpickle by calling :func:`install`, which is how child processes install."""
        return install, (True,) if self.fully_shard else ()


@dataclass(frozen=True, slots=True)
class _Binding:
    """Pairs torch's object under a name of a module with the object that replaces it."""

    namespace: dict[str, Any]
    name: str
    theirs: Any
    ours: Any


@dataclass(slots=True)
class _State:
    """Holds the state that :func:`uninstall` restores; global to the process, as the replaced names are."""

    bindings: list[_Binding] = field(default_factory=list)
    guarded: tuple[Any, Any] | None = None
    fully_shard: bool = False


_state = _State()
# Key in the dict that multiprocessing pickles with every child process.
_CONFIG_KEY = "fsdp_flat"


def install(fully_shard: bool = False) -> Installation:
    """Bind every name of torch's FSDP1 to its counterpart in fsdp_flat, in this process and those it starts.

    This replaces the names in ``torch.distributed.fsdp`` and its modules, and the names that any imported module has
    bound to one of those objects (``from torch.distributed.fsdp import FullyShardedDataParallel as FSDP`` in a
    client, in ``torch.distributed.checkpoint.state_dict``, in ``__main__``). Code imported later imports the
    replaced names. Processes started by ``multiprocessing`` install too.

    References to torch's class inside other objects cannot be replaced: a subclass, a default argument, a container.
    Constructing such a wrapper raises an error while fsdp_flat is installed. Do not use models that torch's FSDPs
    sharded before while fsdp_flat is installed.

    Calling it again also replaces names in modules imported since.

    Where the machine has no accelerator, accelerate, transformers and Lightning shard on CPUs from then on, instead of
    leaving FSDP out or refusing it; a state that accelerate made before stays as it is.

    Args:
        fully_shard: replace the names of FSDP2 too: ``fully_shard``, ``FSDPModule``, the policies and the rest. By
            default they stay, or remain replaced by an earlier call.

    Returns:
        All names replaced, by this call and earlier ones; printable.
    """
    _state.fully_shard = _state.fully_shard or fully_shard
    table = _fsdp1_bindings() + (_fsdp2_bindings() if _state.fully_shard else ())
    to_ours = {id(pair.theirs): pair.ours for pair in table}
    for pair in table:
        if isinstance(pair.theirs, type) and issubclass(pair.theirs, Enum):
            to_ours.update((id(member), pair.ours[member.name]) for member in pair.theirs)
    bindings = list(table)
    for namespace in namespaces():
        if not is_inside(name_of(namespace), OURS) and not is_inside(name_of(namespace), PEER):
            names = list(namespace.items())
            bindings += [_Binding(namespace, name, it, to_ours[id(it)]) for name, it in names if id(it) in to_ours]
    for binding in bindings:
        # Not setattr, which lazy-loading modules may have overridden.
        if binding.namespace.get(binding.name) is binding.theirs:
            binding.namespace[binding.name] = binding.ours
            _state.bindings.append(binding)

    wrapper = next(pair.theirs for pair in table if pair.name == "FullyShardedDataParallel")
    if _state.guarded is None:
        _state.guarded = wrapper, wrapper.__init__
        wrapper.__init__ = _guarded_init
    done = Installation(
        tuple((name_of(binding.namespace), binding.name) for binding in _state.bindings),
        tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in _subclasses(wrapper)),
        _state.fully_shard,
    )
    process.current_process()._config[_CONFIG_KEY] = done  # type: ignore[attr-defined]
    client_gates.lift(_state.fully_shard)
    return done


def uninstall() -> None:
    """Undo :func:`install`: rebind every replaced name to torch's object, unless it was changed since.

    Modules of torch that were imported meanwhile get torch's objects too. Other modules imported meanwhile keep
    fsdp_flat's, because they may have imported them from fsdp_flat. Without an installation nothing happens.
    """
    if _state.guarded is None:
        return
    client_gates.restore()
    for binding in _state.bindings:
        if binding.namespace.get(binding.name) is binding.ours:
            binding.namespace[binding.name] = binding.theirs
    to_theirs = {id(binding.ours): binding.theirs for binding in _state.bindings}
    for namespace in namespaces():
        if is_inside(name_of(namespace), "torch"):
            for name, value in list(namespace.items()):
                if id(value) in to_theirs:
                    namespace[name] = to_theirs[id(value)]
    wrapper, init = _state.guarded
    wrapper.__init__ = init
    _state.bindings, _state.guarded, _state.fully_shard = [], None, False
    process.current_process()._config.pop(_CONFIG_KEY, None)  # type: ignore[attr-defined]


@contextmanager
def installed(fully_shard: bool = False) -> Iterator[Installation]:
    """Run :func:`install` for the block, and :func:`uninstall` after it unless it was installed before.

    Args:
        fully_shard: as for :func:`install`.

    Yields:
        The installation.
    """
    before = _state.guarded is not None
    done = install(fully_shard)
    try:
        yield done
    finally:
        if not before:
            uninstall()


def name_of(namespace: dict[str, Any]) -> str:
    return str(namespace.get("__name__"))


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return direct + [found for below in direct for found in _subclasses(below)]


@functools.cache
def _fsdp1_bindings() -> tuple[_Binding, ...]:
    """Pair all names of FSDP1, and the private ones of both FSDPs, once, before anything is replaced."""
    # Activation checkpointing tests policies by class; a policy of torch's class must pass too.
    _Policy.register(importlib.import_module(f"{PEER}.wrap")._Policy)
    found: list[_Binding] = []
    private = " ".join(WORKS.values()).split()
    for suffix in (*MIRRORED_MODULES, *PRIVATE_MODULES):
        namespace = vars(importlib.import_module(f"{PEER}.{suffix}" if suffix else PEER))
        for name, theirs in namespace.items():
            # Strategies are in plain lists and tuples.
            is_of_peer = str(getattr(theirs, "__module__", "")).startswith(PEER) or name.endswith("_STRATEGIES")
            home = home_of(suffix, name) if is_of_peer else None
            if home is not None and name not in private:
                found.append(_Binding(namespace, name, theirs, getattr(importlib.import_module(home), name)))
    return (*found, *_private_bindings())


def _private_bindings() -> list[_Binding]:
    """Pair the functions and classes of the table of private names, wherever torch's modules have bound them."""
    ours = {}
    for suffix, names in WORKS.items():
        for name in names.split():
            theirs = getattr(_torch_module(suffix), name, None)
            if theirs is not None:  # older versions lack some
                ours[theirs] = private_functions.either(getattr(private_functions, name), theirs)
    for advice, by_module in RAISES.items():
        for suffix, names in by_module.items():
            for name in names.split():
                theirs = getattr(_torch_module(suffix), name, None)
                if theirs is not None:
                    ours[theirs] = private_functions.either(private_functions.refusal(name, advice), theirs)
    for (suffix, name), classes in JOINED.items():
        theirs = getattr(_torch_module(suffix), name)
        ours[theirs] = private_functions.joined(theirs, list(map(pkgutil.resolve_name, classes)))
    by_id = {id(theirs): each for theirs, each in ours.items()}
    torchs = [vars(module) for name, module in list(sys.modules.items()) if is_inside(name, "torch.distributed")]
    return [
        _Binding(namespace, name, value, by_id[id(value)])
        for namespace in torchs
        for name, value in list(namespace.items())
        if id(value) in by_id
    ]


def _torch_module(suffix: str) -> ModuleType:
    return importlib.import_module(f"torch.distributed.{suffix}")


@functools.cache
def _fsdp2_bindings() -> tuple[_Binding, ...]:
    """Pair all names of FSDP2, once, before anything is replaced."""
    ours = importlib.import_module(OURS)
    namespaces = [vars(importlib.import_module(module)) for module in FSDP2_MODULES]
    return tuple(
        _Binding(namespace, name, namespace[name], getattr(ours, name))
        for namespace in namespaces
        for name in FSDP2_NAMES
        if name in namespace
    )


def _guarded_init(self: Any, *args: Any, **kwargs: Any) -> None:
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
