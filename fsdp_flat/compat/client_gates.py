"""Lifts the checks by which clients refuse FSDP, or leave it out, on machines without an accelerator.

Clients were written when FSDP needed an accelerator. On CPUs accelerate does not connect the processes that torchrun
started, or wraps in DistributedDataParallel; Lightning raises an error. :func:`lift` replaces those checks in a client
when the client is imported, and at once if it was imported before. With an accelerator in the machine, clients stay as
they are.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from fsdp_flat.errors import phrase
from fsdp_flat.user_warnings import warn_user

_logger = logging.getLogger("fsdp_flat")

# The versions that are known to have the checks below, and no others; others are treated alike, with a warning.
VERSIONS = {
    "accelerate": SpecifierSet(">=1.6,<1.16"),
    "transformers": SpecifierSet(">=4.51,<5.24"),
    "lightning": SpecifierSet(">=2.2,<2.7"),
    "pytorch-lightning": SpecifierSet(">=2.2,<2.7"),
}


@dataclass(slots=True)
class _Lifted:
    """Holds what :func:`restore` undoes; global to the process, as the clients are.

    Attributes:
        replaced: (owner, name, the client's function, our function) of each replaced function.
        modules: the modules of clients that were treated.
        told: the clients that the log names.
        fully_shard: FSDP2's names are fsdp_flat's.
        command: words that start a script as this process was started, or none if Python alone does.
    """

    replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    fully_shard: bool = False
    command: tuple[str, ...] = ()


_lifted = _Lifted()


def lift(fully_shard: bool) -> None:
    """Lift the checks of clients that are imported, and of others when they are imported.

    Args:
        fully_shard: FSDP2's names are fsdp_flat's, so a client's FSDP of version 2 is.
    """
    _lifted.fully_shard = fully_shard
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    for name in _GATES:
        if name in sys.modules:
            _treat(sys.modules[name])


def restore() -> None:
    """Undo :func:`lift`: give clients back the functions that were replaced."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for owner, name, theirs, ours in reversed(_lifted.replaced):
        if vars(owner).get(name) is ours:
            setattr(owner, name, theirs)
    _lifted.replaced, _lifted.modules, _lifted.told = [], set(), set()


def start_processes_with(command: Sequence[str]) -> None:
    """Have clients that start a script once more, for other ranks, start it with these words after Python's own.

    Args:
        command: the words between the name of Python and the script, as ``("-m", "fsdp_flat.run")``.
    """
    _lifted.command = tuple(command)


class _Finder(MetaPathFinder):
    """Treats modules of clients after their import; finds none itself."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _GATES or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.remove(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    _treat(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def _treat(module: ModuleType) -> None:
    """Replace the checks of a client's module, once, and log the client."""
    name = module.__name__
    if name in _lifted.modules or torch.accelerator.is_available():
        return
    client, treat = _GATES[name]
    version, is_known = "of an unknown version", False
    with suppress(metadata.PackageNotFoundError, InvalidVersion):
        version = metadata.version(client)
        is_known = VERSIONS[client].contains(version, prereleases=True)
    try:
        treat(module)
    except AttributeError as error:
        warn_user(
            f"fsdp_flat cannot lift the checks by which {client} {version} refuses FSDP on CPUs, or leaves it out: "
            f"{phrase(error)}. It knows {client} {VERSIONS[client]}."
        )
        return
    _lifted.modules.add(name)
    if client in _lifted.told:
        return
    _lifted.told.add(client)
    if not is_known:
        warn_user(
            f"fsdp_flat lifts the checks by which {client} {VERSIONS[client]} refuses FSDP on CPUs, or leaves it out; "
            f"{client} {version} may have others. See that the model is wrapped: print(model)."
        )
    _logger.info("%s %s: FSDP on CPUs is allowed, with fsdp_flat", client, version)


def _replace(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator: put a function, which gets the client's own first, in place of ``owner.name``."""
    theirs = getattr(owner, name)

    def put(ours: Callable[..., Any]) -> None:
        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        setattr(owner, name, call)
        _lifted.replaced.append((owner, name, theirs, call))

    return put


# -- accelerate, and so transformers' Trainer -------------------------------------------------------------------------


def _accelerate_state(module: ModuleType) -> None:
    """Connect the processes of torchrun on CPUs, and keep the FSDP plugin there."""
    kinds = module.DistributedType
    partial, whole = module.PartialState, module.AcceleratorState

    @_replace(partial, "__init__")
    def connect(theirs: Any, self: Any, cpu: bool = False, **kwargs: Any) -> None:
        theirs(self, cpu or int(os.environ.get("LOCAL_RANK", -1)) != -1, **kwargs)

    @_replace(whole, "__init__")
    def keep_plugin(theirs: Any, self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        is_new = not whole._shared_state
        theirs(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None:
            return
        if is_new and self.distributed_type == kinds.MULTI_CPU:
            # What accelerate does for several processes with accelerators.
            self.distributed_type = partial._shared_state["distributed_type"] = kinds.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
        if self.distributed_type != kinds.FSDP:
            how = "by DistributedDataParallel" if self.distributed_type == kinds.MULTI_CPU else "without sharding"
            warn_user(
                f"accelerate was asked for FSDP and trains {how} (distributed_type {self.distributed_type.value}). "
                "Start the script by torchrun or accelerate launch, call fsdp_flat.install() first, and give the "
                "plugin to the first Accelerator."
            )
        elif fsdp_plugin.fsdp_version == 2 and not _lifted.fully_shard:
            warn_user(
                "accelerate uses FSDP version 2, which is torch's fully_shard here. For fsdp_flat's: "
                "python -m fsdp_flat.run --fully-shard, or fsdp_flat.install(fully_shard=True)."
            )


def _accelerate_plugin(module: ModuleType) -> None:
    """Let ``sync_module_states`` be true: accelerate looks for an accelerator to make parameters on."""

    @_replace(module.FullyShardedDataParallelPlugin, "__post_init__")
    def make(theirs: Any, self: Any) -> None:
        try:
            theirs(self)
        except RuntimeError as error:
            # Raised after all else is set.
            if not (self.sync_module_states and "no available devices" in str(error)):
                raise
            self.param_init_fn = lambda unmade: unmade.to_empty(device="cpu", recurse=False)


def _transformers_arguments(module: ModuleType) -> None:
    """Set ``use_cpu`` where FSDP is asked for, without which transformers refuses bf16 on CPUs; name unknown keys."""

    @_replace(module.TrainingArguments, "__post_init__")
    def make(theirs: Any, self: Any) -> None:
        self.use_cpu = self.use_cpu or bool(self.fsdp) or "ACCELERATE_USE_FSDP" in os.environ
        theirs(self)
        # transformers has no list of the keys, and ignores others: those that its source nowhere has.
        given, source = self.fsdp_config, inspect.getsource(module)
        unknown = (
            [key for key in given if not re.search(rf"\b{re.escape(key)}\b", source)] if isinstance(given, dict) else []
        )
        if unknown:
            warn_user(
                f"fsdp_config has keys that transformers does not read, so they change nothing: {', '.join(unknown)}. "
                "The documentation of TrainingArguments lists those of fsdp_config; accelerate's have other names."
            )


# -- Lightning and Fabric ---------------------------------------------------------------------------------------------


def _lightning_connector(class_name: str, module: ModuleType) -> None:
    """Let the connector accept FSDP with the CPU accelerator."""
    strategy = module.FSDPStrategy

    @_replace(getattr(module, class_name), "_check_strategy_and_fallback")
    def check(theirs: Any, self: Any) -> None:
        asked, accelerator = self._strategy_flag, self._accelerator_flag
        is_fsdp = isinstance(asked, strategy) or (isinstance(asked, str) and asked.startswith("fsdp"))
        is_cpu = accelerator == "cpu" or type(accelerator).__name__ == "CPUAccelerator"
        if is_fsdp and is_cpu:
            self._accelerator_flag = "cuda"  # during the check only
        try:
            theirs(self)
        finally:
            self._accelerator_flag = accelerator


def _lightning_strategy(options: str, module: ModuleType) -> None:
    """Make a ``device_mesh`` given as a tuple on CPUs; Lightning makes it on CUDA."""

    @_replace(module.FSDPStrategy, "setup_environment")
    def set_up(theirs: Any, self: Any) -> None:
        given = getattr(self, options)
        shape = given.get("device_mesh")
        if isinstance(shape, tuple):
            given["device_mesh"] = None  # until there is a process group
        theirs(self)
        if isinstance(shape, tuple):
            given["device_mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", shape)


def _lightning_launcher(module: ModuleType) -> None:
    """Start the script of the other ranks as that of this rank was started."""

    @_replace(module, "_basic_subprocess_cmd")
    def command(theirs: Any) -> Sequence[str]:
        python, *rest = theirs()
        ours = list(_lifted.command)
        # The Trainer's launcher may have imported Fabric's function, with this one in its place.
        return [python, *rest] if rest[: len(ours)] == ours else [python, *ours, *rest]


_GATES: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "accelerate.state": ("accelerate", _accelerate_state),
    "accelerate.utils.dataclasses": ("accelerate", _accelerate_plugin),
    "transformers.training_args": ("transformers", _transformers_arguments),
}
# The same code under two names; pytorch-lightning brings lightning_fabric.
for _client, _fabric, _trainer in (
    ("lightning", "lightning.fabric", "lightning.pytorch"),
    ("pytorch-lightning", "lightning_fabric", "pytorch_lightning"),
):
    _GATES |= {
        f"{_fabric}.connector": (_client, functools.partial(_lightning_connector, "_Connector")),
        f"{_fabric}.strategies.fsdp": (_client, functools.partial(_lightning_strategy, "_fsdp_kwargs")),
        f"{_fabric}.strategies.launchers.subprocess_script": (_client, _lightning_launcher),
        f"{_trainer}.trainer.connectors.accelerator_connector": (
            _client,
            functools.partial(_lightning_connector, "_AcceleratorConnector"),
        ),
        f"{_trainer}.strategies.fsdp": (_client, functools.partial(_lightning_strategy, "kwargs")),
        f"{_trainer}.strategies.launchers.subprocess_script": (_client, _lightning_launcher),
    }
