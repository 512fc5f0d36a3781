"""Implements ``install()``, which makes the names of torch's FSDPs resolve to fsdp_flat's, in all imported code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import process
from types import FunctionType, ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Replaced:
    """Describes a name that now resolves to fsdp_flat's object.

    Attributes:
        module: the module that holds the name.
        name: the name in that module.
    """

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Installation:
    """Reports the changes made by :func:`install`; ``str`` lists them, one line per module.

    Attributes:
        replaced: the replaced names, those in torch's modules first.
        left: subclasses of torch's wrapper that were defined before; constructing one raises an error.
        fully_shard: FSDP2's names are replaced too.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[str, ...]
    fully_shard: bool = False

    def __str__(self) -> str:
        modules: dict[str, list[str]] = {}
        for replaced in self.replaced:
            modules.setdefault(replaced.module, []).append(replaced.name)
        lines = [f"{len(self.replaced)} names in {len(modules)} modules are fsdp_flat's now:"]
        lines += [f"  {module}: {', '.join(names)}" for module, names in modules.items()]
        if self.left:
            lines.append(f"made of torch's FSDP1 before, and unusable until uninstall(): {', '.join(self.left)}")
        return "\n".join(lines)

    def __reduce__(self) -> Any:
        """Unpickle by calling :func:`install`, which is how child processes install."""
        return install, (True,) if self.fully_shard else ()


@dataclass(slots=True)
class _Binding:
    namespace: dict[str, Any]
    name: str
    theirs: Any
    ours: Any


@dataclass(slots=True)
class _State:
    """Holds the state that :func:`uninstall` restores; global to the process, as the replaced names are."""

    bindings: list[_Binding] = field(default_factory=list)
    back: dict[int, Any] = field(default_factory=dict)
    init: Any = None
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

    Args:
        fully_shard: replace the names of FSDP2 too: ``fully_shard``, ``FSDPModule``, the policies and the rest. By
            default they stay, or remain replaced by an earlier call.

    Returns:
        All names replaced, by this call and earlier ones; printable.
    """
    from fsdp_flat.compat.fsdp1_names import PEER
    from fsdp_flat.compat.substitutes import entries, fsdp2_entries, guarded_init, replacements

    _state.fully_shard = _state.fully_shard or fully_shard
    table = entries() + (fsdp2_entries() if _state.fully_shard else ())
    to_ours = replacements(table)
    bindings = [_Binding(vars(entry.module), entry.name, entry.theirs, entry.ours) for entry in table]
    for namespace in _namespaces():
        if not _is_below(namespace, _PACKAGE) and not _is_below(namespace, PEER):
            names = list(namespace.items())
            bindings += [_Binding(namespace, name, it, to_ours[id(it)]) for name, it in names if id(it) in to_ours]
    for binding in bindings:
        # Not setattr, which lazy-loading modules may have overridden.
        if binding.namespace.get(binding.name) is binding.theirs:
            binding.namespace[binding.name] = binding.ours
            _state.bindings.append(binding)

    wrapper = next(entry.theirs for entry in table if entry.name == "FullyShardedDataParallel")
    if _state.init is None:
        _state.init = wrapper.__init__
        wrapper.__init__ = guarded_init
    _state.back.update({id(entry.ours): entry.theirs for entry in table})
    done = Installation(
        tuple(Replaced(str(binding.namespace.get("__name__")), binding.name) for binding in _state.bindings),
        tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in _subclasses(wrapper)),
        _state.fully_shard,
    )
    process.current_process()._config[_CONFIG_KEY] = done  # type: ignore[attr-defined]
    return done


def uninstall() -> None:
    """Undo :func:`install`: rebind every replaced name to torch's object, unless it was changed since.

    Modules of torch that were imported meanwhile get torch's objects too. Other modules imported meanwhile keep
    fsdp_flat's, because they may have imported them from fsdp_flat. Without an installation nothing happens.
    """
    if _state.init is None:
        return
    from fsdp_flat.compat.substitutes import entries

    for binding in _state.bindings:
        if binding.namespace.get(binding.name) is binding.ours:
            binding.namespace[binding.name] = binding.theirs
    for namespace in _namespaces():
        if _is_below(namespace, "torch"):
            for name, value in list(namespace.items()):
                if id(value) in _state.back:
                    namespace[name] = _state.back[id(value)]
    wrapper = next(entry.theirs for entry in entries() if entry.name == "FullyShardedDataParallel")
    wrapper.__init__ = _state.init
    _state.bindings, _state.back, _state.init, _state.fully_shard = [], {}, None, False
    process.current_process()._config.pop(_CONFIG_KEY, None)  # type: ignore[attr-defined]


@contextmanager
def installed(fully_shard: bool = False) -> Iterator[Installation]:
    """Run :func:`install` for the block, and :func:`uninstall` after it unless it was installed before.

    Args:
        fully_shard: as for :func:`install`.

    Yields:
        The installation.
    """
    before = _state.init is not None
    done = install(fully_shard)
    try:
        yield done
    finally:
        if not before:
            uninstall()


def _namespaces() -> list[dict[str, Any]]:
    """Return the globals of every module, and of functions in modules whose globals belong to no module.

    ``runpy.run_path`` leaves such functions; a spawned process gets its ``__main__`` by it.
    """
    found = {id(vars(module)): vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    for namespace in list(found.values()):
        for value in list(namespace.values()):
            if type(value) is FunctionType:
                found.setdefault(id(value.__globals__), value.__globals__)
    return list(found.values())


def _is_below(namespace: dict[str, Any], package: str) -> bool:
    name = str(namespace.get("__name__", ""))
    return name == package or name.startswith(package + ".")


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return direct + [found for below in direct for found in _subclasses(below)]
