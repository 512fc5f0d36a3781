"""Implements ``install()``, which makes the names of torch's FSDPs resolve to fsdp_flat's, in all imported code.

The private functions at the end have the names, arguments and results of ``torch.distributed.fsdp``'s
``_common_utils``, ``_traversal_utils``, ``_runtime_utils`` and ``_unshard_param_utils``. A call is dispatched by its
first argument: torch's function is called for a module that contains none of our wrappers. Our wrapper is both the FSDP
state and the module. ``torch.distributed.fsdp`` is imported by ``install()`` only.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import process
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from fsdp_flat.compat import client_gates
from fsdp_flat.compat.semi_private import FlatParamHandle, UndocumentedMembers
from fsdp_flat.compat.torch_names import (
    FSDP2_MODULES,
    FSDP2_NAMES,
    MIRRORED_MODULES,
    OURS,
    PEER,
    PRIVATE_MODULES,
    SUBSTITUTES,
    home_of,
    is_inside,
)
from fsdp_flat.errors import UsageError
from fsdp_flat.runtime import summon_full_params
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
        lines = [f"{len(self.replaced)} names in {len(modules)} modules are fsdp_flat's now:"]
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


def namespaces() -> list[dict[str, Any]]:
    """Return the globals of every module, and of functions in modules whose globals belong to no module.

    ``runpy.run_path`` leaves such functions; a spawned process gets its ``__main__`` by it.
    """
    found = {id(vars(module)): vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    for namespace in list(found.values()):
        for value in list(namespace.values()):
            if type(value) is FunctionType:
                found.setdefault(id(value.__globals__), value.__globals__)
    return list(found.values())


def name_of(namespace: dict[str, Any]) -> str:
    return str(namespace.get("__name__"))


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return direct + [found for below in direct for found in _subclasses(below)]


@functools.cache
def _fsdp1_bindings() -> tuple[_Binding, ...]:
    """Pair all names of FSDP1, once, before anything is replaced."""
    # Activation checkpointing tests policies by class; a policy of torch's class must pass too.
    _Policy.register(importlib.import_module(f"{PEER}.wrap")._Policy)
    found: list[_Binding] = []
    either: dict[Any, Callable[..., Any]] = {}
    for suffix in (*MIRRORED_MODULES, *PRIVATE_MODULES):
        namespace = vars(importlib.import_module(f"{PEER}.{suffix}" if suffix else PEER))
        for name, theirs in namespace.items():
            # Strategies are in plain lists and tuples.
            is_of_peer = str(getattr(theirs, "__module__", "")).startswith(PEER) or name.endswith("_STRATEGIES")
            home = home_of(suffix, name) if is_of_peer else None
            if home is not None:
                ours = vars(importlib.import_module(home))[name]
                if home == SUBSTITUTES and isinstance(ours, FunctionType):
                    ours = either.setdefault(theirs, _either(ours, theirs))
                found.append(_Binding(namespace, name, theirs, ours))
    return tuple(found)


@functools.cache
def _fsdp2_bindings() -> tuple[_Binding, ...]:
    """Pair all names of FSDP2, once, before anything is replaced."""
    ours = vars(importlib.import_module(OURS))
    namespaces = [vars(importlib.import_module(module)) for module in FSDP2_MODULES]
    return tuple(
        _Binding(namespace, name, namespace[name], ours[name])
        for namespace in namespaces
        for name in FSDP2_NAMES
        if name in namespace
    )


def _either(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours if its first argument contains one of our wrappers, else torch's."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        return (ours if isinstance(first, nn.Module) and _get_fsdp_states(first) else theirs)(*args, **kwargs)

    return call


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


# -- private functions of torch, for our wrapper ----------------------------------------------------------------------


def _get_module_fsdp_state(module: nn.Module) -> UndocumentedMembers | None:
    return module if isinstance(module, UndocumentedMembers) else None


_get_module_fsdp_state_if_fully_sharded_module = _get_module_fsdp_state


def _get_fsdp_states(module: nn.Module) -> list[UndocumentedMembers]:
    return [child for child in module.modules() if isinstance(child, UndocumentedMembers)]


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[UndocumentedMembers], list[UndocumentedMembers]]:
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


def _post_backward_final_callback(state: UndocumentedMembers, module: nn.Module) -> None:
    state.reset_iter_state()  # clients call it to clean up after a step that raised


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
