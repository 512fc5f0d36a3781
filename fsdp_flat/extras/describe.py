"""Describes the units of a wrapped model, or of a model before it is wrapped, with their bytes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import ShardingStrategy
from fsdp_flat.comm import RankGroup, ShardingGroups, Strategy, strategy_from
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.flat import FlatParamHandle, ManagedParam, collect_params, named_sites
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import (
    Ignored,
    UnitControl,
    UnitOptions,
    handles_of,
    owners_of_ties,
    precision_from,
    resolve_ignored,
    units_of,
)
from fsdp_flat.wrap import UnitPlan, plan_units

_SUMMED = ("num_params", "numel", "trainable_numel", "shard_nbytes", "grad_nbytes", "gathered_nbytes")


@dataclass(frozen=True, slots=True)
class UnitDescription:
    """Describes one unit, in bytes of one rank.

    Attributes:
        name: its path; for the outermost unit the class of the model.
        strategy: name of the ``ShardingStrategy``.
        dtypes: dtypes of the unsharded parameters, by name without ``torch.``.
        num_params: parameters, a tied one counted once.
        numel: their elements, over all ranks.
        trainable_numel: elements of parameters that get gradients.
        shard_nbytes: bytes of this rank's shard of the parameters.
        grad_nbytes: bytes of this rank's shard of the gradients after a backward; 0 for frozen parameters.
        gathered_nbytes: bytes of the unsharded parameters; 0 if nothing is sharded.
        whole_grad_nbytes: bytes of the gradient before it is reduced.
        is_gathered: memory of unsharded parameters is allocated now.
        reshard_after_forward: the parameters are freed after forward; None: unless the unit is the outermost.
    """

    name: str
    strategy: str
    dtypes: tuple[str, ...]
    num_params: int
    numel: int
    trainable_numel: int
    shard_nbytes: int
    grad_nbytes: int
    gathered_nbytes: int
    whole_grad_nbytes: int
    is_gathered: bool = False
    reshard_after_forward: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Describes the units of a model, parents before children; ``str`` of it is a table.

    Attributes:
        units: the units that have parameters.
        num_shards: ranks that the parameters of the outermost unit are sharded over.
        num_replicas: ranks that hold the same shard of it.
        most_gathered_nbytes: maximum bytes of unsharded parameters that exist at one time in a step: with a strategy
            that frees parameters after forward the outermost unit and the two largest others, else all.
    """

    units: tuple[UnitDescription, ...]
    num_shards: int
    num_replicas: int
    most_gathered_nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of parameters that a rank keeps."""
        return sum(unit.shard_nbytes for unit in self.units)

    @property
    def grad_nbytes(self) -> int:
        """Bytes of gradients that a rank keeps after a backward."""
        return sum(unit.grad_nbytes for unit in self.units)

    def __str__(self) -> str:
        head = ("unit", "strategy", "dtype", "parameters", "elements", "trainable", "shard", "gradient", "gathered")
        rows: list[tuple[str, ...]] = [head]
        for unit in self.units:
            name = f"{unit.name}{' *' if unit.is_gathered else ''}"
            numbers = [f"{getattr(unit, column):,}" for column in _SUMMED]
            rows.append((name, unit.strategy, ", ".join(unit.dtypes), *numbers))
        sums = [sum(getattr(unit, column) for unit in self.units) for column in _SUMMED]
        rows.append(("all", "", "", *[f"{number:,}" for number in sums]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([*map(str.ljust, row[:3], widths), *map(str.rjust, row[3:], widths[3:])]).rstrip() for row in rows
        ]
        shape = f"{self.num_shards} shards x {self.num_replicas} replicas"
        lines.append(f"{shape}; bytes of one rank; gathered at one time: at most {self.most_gathered_nbytes:,}")
        return "\n".join(lines)


def describe(model: nn.Module) -> ModelDescription:
    """Describe the units of a wrapped model, with their bytes. Nothing is communicated.

    ``print(describe(model))`` shows the units of an auto-wrap policy, and marks those that hold memory of unsharded
    parameters now (``*``).

    Args:
        model: a wrapper, or any module that holds wrappers.

    Raises:
        OptionError: nothing at or below ``model`` is wrapped.
    """
    units = units_of(model)
    if not units:
        raise OptionError(
            f"{type(model).__name__} holds no FullyShardedDataParallel to describe; plan(module, num_ranks, ...) "
            "describes a model before it is wrapped."
        )
    paths = {unit: clean_fqn(path) for path, child in model.named_modules() for unit in units_of(child, recurse=False)}
    described = {
        unit if mesh is unit.meshes[0] else mesh: _described(
            (paths[unit] or type(unit.module).__name__) + mesh.suffix,
            mesh.options,
            mesh.handles,
            unit.control.reshard_after_forward,
            is_gathered=any(handle.buffer.owns_memory and handle.buffer.nbytes for handle in mesh.handles),
        )
        for unit in units
        for mesh in unit.meshes
        if mesh.handles
    }
    return _summed(described, units[0], units[0].options.groups)


def plan(
    module: nn.Module,
    num_ranks: int,
    *,
    num_replicas: int = 1,
    sharding_strategy: Any = None,
    auto_wrap_policy: Any = None,
    mixed_precision: Any = None,
    ignored_modules: Any = None,
    ignored_states: Any = None,
    use_orig_params: bool = False,
) -> ModelDescription:
    """Describe the units that ``FullyShardedDataParallel`` would make of a module, with their bytes of one rank.

    It needs no process group, and changes and allocates nothing, so the module may be on the meta device::

        with torch.device("meta"):
            model = build()
        print(plan(model, 64, auto_wrap_policy=ModuleWrapPolicy({Block})))

    Args:
        module: an unwrapped module.
        num_ranks: ranks of the job.
        num_replicas: ranks that hold the same shard, for hybrid strategies.
        sharding_strategy, auto_wrap_policy, mixed_precision, ignored_modules, ignored_states, use_orig_params: as for
            ``FullyShardedDataParallel``.

    Raises:
        OptionError: ``num_ranks`` is not a multiple of ``num_replicas``, or wrapping would raise it.
    """
    _check_numbers(num_ranks, num_replicas, strategy_from(sharding_strategy))
    if units_of(module):
        raise OptionError(
            f"{type(module).__name__} holds a FullyShardedDataParallel already; describe(model) shows it."
        )
    root, ignored = _meta_copy(module, resolve_ignored(module, ignored_modules, ignored_states, nested=()))
    kwargs = {
        "sharding_strategy": sharding_strategy,
        "mixed_precision": mixed_precision,
        "use_orig_params": use_orig_params,
    }
    units = [UnitPlan(type(module).__name__, root, kwargs)]
    if auto_wrap_policy is not None:
        units += plan_units(
            root,
            auto_wrap_policy,
            ignored_modules=set(ignored.modules),
            ignored_params=set(ignored.params),
            root_kwargs=kwargs,
        ).units
    position = {module: index for index, module in enumerate(root.modules())}
    units.sort(key=lambda unit: position[unit.module])
    # By parameter, the module of its unit: the innermost one, but for ties.
    homes = {param: unit.module for unit in units for _, param in named_sites(unit.module)}
    homes |= owners_of_ties(root, [unit.module for unit in units[1:]], ignored.has)

    def collect(unit: UnitPlan) -> list[ManagedParam]:
        return collect_params(
            unit.module,
            unit_name=unit.fqn,
            skip=lambda param: ignored.has(param) or homes[param] is not unit.module,
            is_managed_below=lambda _module, _name: False,
        )

    # Collect all parameters before the first handle, which replaces parameters by shards.
    collected = [collect(unit) for unit in units]
    described: dict[nn.Module, UnitDescription] = {}
    for unit, params in zip(units, collected, strict=True):
        options = _options(unit.kwargs, num_ranks, num_replicas)
        if handles := handles_of(params, unit.module, unit.fqn, options):
            reshard_after_forward = UnitControl.of(options.strategy).reshard_after_forward
            described[unit.module] = _described(unit.fqn, options, handles, reshard_after_forward)
    return _summed(described, root, _options(kwargs, num_ranks, num_replicas).groups)


def _check_numbers(num_ranks: int, num_replicas: int, strategy: Strategy) -> None:
    """Raise if the numbers of ranks and of replicas do not fit each other or the strategy."""
    if not all(isinstance(each, int) for each in (num_ranks, num_replicas)):
        raise OptionTypeError(f"num_ranks and num_replicas must be integers; got {num_ranks!r} and {num_replicas!r}.")
    if num_ranks < 1 or num_replicas < 1 or num_ranks % num_replicas:
        raise OptionError(
            f"num_ranks must be a positive multiple of num_replicas; got num_ranks={num_ranks} and "
            f"num_replicas={num_replicas}."
        )
    if num_replicas > 1 and not strategy.is_hybrid:
        raise OptionError(
            f"num_replicas is for hybrid strategies; got num_replicas={num_replicas} with {strategy.member.name}."
        )


def _meta_copy(module: nn.Module, ignored: Ignored) -> tuple[nn.Module, Ignored]:
    """Return a copy of ``module`` on the meta device, and what is ignored in the copy."""
    params = {
        param: nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        for param in (*module.parameters(), *ignored.params)
    }
    buffers = {buffer: torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    copies: dict[int, Any] = {id(tensor): twin for tensor, twin in (*params.items(), *buffers.items())}
    root = copy.deepcopy(module, copies)
    modules = dict(zip(module.modules(), root.modules(), strict=True))
    return root, Ignored(
        frozenset(modules[child] for child in ignored.modules if child in modules),
        frozenset(params[param] for param in ignored.params),
    )


def _options(kwargs: dict[str, Any], num_ranks: int, num_replicas: int) -> UnitOptions:
    """Return the options of a unit on rank 0 of ``num_ranks`` hypothetical ranks."""
    strategy = strategy_from(kwargs["sharding_strategy"])
    if num_ranks == 1:
        strategy = strategy_from(ShardingStrategy.NO_SHARD)
    num_shards = num_ranks // num_replicas if strategy.shards else 1
    return UnitOptions(
        strategy=strategy,
        groups=ShardingGroups(RankGroup(None, 0, num_shards), RankGroup(None, 0, num_ranks // num_shards)),
        device=torch.device("meta"),
        use_orig_params=bool(kwargs["use_orig_params"]),
        precision=precision_from(kwargs["mixed_precision"]),
    )


def _described(
    name: str,
    options: UnitOptions,
    handles: Sequence[FlatParamHandle],
    reshard_after_forward: bool | None,
    *,
    is_gathered: bool = False,
) -> UnitDescription:
    trainable = [handle for handle in handles if handle.num_trainable]
    gathered = [handle for handle in handles if handle.buffer.owns_memory]
    return UnitDescription(
        name=name,
        strategy=options.strategy.member.name,
        dtypes=tuple(dict.fromkeys(str(handle.compute_dtype).removeprefix("torch.") for handle in handles)),
        num_params=sum(len(handle.layout.param_infos) for handle in handles),
        numel=sum(param_info.numel for handle in handles for param_info in handle.layout.param_infos),
        trainable_numel=sum(
            param_info.numel
            for handle in trainable
            for param_info, wanted in zip(handle.layout.param_infos, handle.requires_grad(), strict=True)
            if wanted
        ),
        shard_nbytes=sum(handle.layout.shard_numel * handle.orig_dtype.itemsize for handle in handles),
        grad_nbytes=sum(
            handle.layout.shard_numel
            * (handle.reduce_dtype if handle.spec.keep_reduce_dtype else handle.orig_dtype).itemsize
            for handle in trainable
        ),
        gathered_nbytes=sum(handle.layout.numel * handle.compute_dtype.itemsize for handle in gathered),
        whole_grad_nbytes=sum(handle.layout.numel * handle.grad_dtype.itemsize for handle in trainable),
        is_gathered=is_gathered,
        reshard_after_forward=reshard_after_forward,
    )


def _summed(described: Mapping[Any, UnitDescription], outermost: Any, groups: ShardingGroups) -> ModelDescription:
    """Combine descriptions of units that have parameters to one of the model; ``outermost`` is on ``groups``."""
    freed: list[int] = []
    kept = 0
    for unit, found in described.items():
        if unit is outermost or found.reshard_after_forward is False:
            kept += found.gathered_nbytes
        else:
            freed.append(found.gathered_nbytes)
    most = kept + sum(sorted(freed)[-2:])
    return ModelDescription(tuple(described.values()), groups.shard.size, groups.replicate.size, most)
