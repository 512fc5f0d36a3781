"""Turns the constructor's arguments into units: validates, plans, compares between ranks, then builds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.api import BackwardPrefetch, ShardingStrategy
from fsdp_flat.comm import ShardingGroups, Strategy, digest_of, resolve_groups, strategy_from, true_on_any_rank
from fsdp_flat.errors import OptionError
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import (
    Ignored,
    UnitOptions,
    agree_on_structure,
    agree_on_weights,
    compute_device_from,
    describe_structure,
    keep_full_precision,
    materialize,
    offloads_params,
    own_buffers,
    owners_of_ties,
    precision_from,
    prefetch_from,
    resolve_ignored,
    sync_states_from,
    unit_of,
)
from fsdp_flat.wrap.plan import WrapPlan, apply_plan, plan_units

__all__ = ["Arguments", "Inherited", "options_from", "prepare"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """Holds the constructor's arguments, with the same names and order."""

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    device_id: Any = None
    sync_module_states: Any = False
    forward_prefetch: Any = False
    limit_all_gathers: Any = True
    use_orig_params: Any = False
    ignored_states: Any = None
    device_mesh: Any = None

    def as_kwargs(self) -> dict[str, Any]:
        """Return the arguments by keyword."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Inherited:
    """Holds the values that the wrapper with an auto-wrap policy passes to the units that it makes.

    Attributes:
        owners: for parameters shared between units, the module whose unit manages them.
        broadcast: units overwrite their tensors with those of rank 0.
        on_meta: on some rank a part of the model is on the meta device.
        name: the unit's name.
        unit_id: identifies the unit among the ranks of ``group``.
        group: the group in which ids are assigned.
    """

    owners: dict[nn.Parameter, nn.Module]
    broadcast: bool
    on_meta: bool
    name: str
    unit_id: int
    group: dist.ProcessGroup | None


# Number of constructor calls by process group, counted once all its ranks have agreed to continue.
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def _count_call(group: dist.ProcessGroup | None) -> int:
    if group is None:
        return 0
    _calls[group] = _calls.get(group, 0) + 1
    return _calls[group]


def options_from(arguments: Arguments) -> UnitOptions:
    """Return the validated options of a unit.

    If they are invalid, the other ranks, which may have been given valid ones, get the error too.

    Raises:
        FsdpFlatError: they are invalid, here or on another rank.
    """
    try:
        return _validated(arguments)
    except Exception as error:
        groups = _groups_despite_errors(arguments)
        if groups is not None:
            agree_on_structure((), error, groups, compute_device_from(None)[0])
        raise


def _groups_despite_errors(arguments: Arguments) -> ShardingGroups | None:
    """Return the groups over which the other ranks compare their models; None if they cannot be determined."""
    try:
        strategy = _strategy_of(arguments)
    except OptionError:
        needs_two = isinstance(arguments.process_group, tuple) or getattr(arguments.device_mesh, "ndim", 1) == 2
        strategy = strategy_from(ShardingStrategy.HYBRID_SHARD if needs_two else None)
    try:
        return _groups_of(arguments, strategy, compute_device_from(None)[0])
    except Exception:
        return None


def _groups_of(arguments: Arguments, strategy: Strategy, device: torch.device) -> ShardingGroups:
    return resolve_groups(
        strategy,
        arguments.process_group,
        arguments.device_mesh,
        has_policy=arguments.auto_wrap_policy is not None,
        device=device,
    )


def _strategy_of(arguments: Arguments) -> Strategy:
    """Return the requested strategy; by default that of the mesh: two dimensions mean hybrid sharding, as in FSDP2."""
    if arguments.sharding_strategy is None and getattr(arguments.device_mesh, "ndim", 1) == 2:
        return strategy_from(ShardingStrategy.HYBRID_SHARD)
    return strategy_from(arguments.sharding_strategy)


def _validated(arguments: Arguments) -> UnitOptions:
    strategy = _strategy_of(arguments)
    device, device_given = compute_device_from(arguments.device_id)
    precision = precision_from(arguments.mixed_precision)
    offload_params = offloads_params(arguments.cpu_offload)
    prefetch = prefetch_from(arguments.backward_prefetch)
    sync_states = sync_states_from(arguments.sync_module_states)
    groups = _groups_of(arguments, strategy, device)
    if groups.num_ranks == 1 and strategy.member is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"{strategy.member.name} over a single rank has nothing to shard; the strategy becomes NO_SHARD.",
            stacklevel=5,
        )
        strategy = strategy_from(ShardingStrategy.NO_SHARD)
    elif strategy.member is ShardingStrategy.NO_SHARD and groups.num_ranks > 1:
        warnings.warn(
            "NO_SHARD keeps whole parameters on every rank; DistributedDataParallel does the same.",
            FutureWarning,
            stacklevel=5,
        )
    return UnitOptions(
        strategy=strategy,
        groups=groups,
        device=device,
        device_given=device_given,
        use_orig_params=bool(arguments.use_orig_params),
        backward_prefetch=prefetch,
        forward_prefetch=bool(arguments.forward_prefetch),
        limit_all_gathers=bool(arguments.limit_all_gathers),
        sync_states=sync_states,
        precision=precision,
        offload_params=offload_params,
        param_init_fn=arguments.param_init_fn,
    )


def prepare(
    module: nn.Module,
    name: str,
    options: UnitOptions,
    arguments: Arguments,
    make_child: Callable[[nn.Module, Arguments, Inherited], nn.Module],
) -> tuple[Ignored, Inherited]:
    """Plan units, compare the plan with the other ranks, and wrap the units that the policy chose."""
    error: Exception | None = None
    plan = WrapPlan(())
    ignored = Ignored(frozenset(), frozenset())
    lines: list[str] = []
    try:
        ignored = resolve_ignored(module, arguments.ignored_modules, arguments.ignored_states)
        if unit_of(module) is not None:
            raise OptionError(
                f"{name} is a FullyShardedDataParallel already. Use it as it is, wrap the modules inside it with an "
                "auto_wrap_policy when it is made, or take it apart with fsdp_flat.unwrap(model) first."
            )
        if module.__dict__.get("_is_fsdp_managed_module", False):
            raise OptionError(
                f"This {name} is part of a FullyShardedDataParallel already, which holds its parameters. Wrap inner "
                "modules before outer ones, or take the model apart with fsdp_flat.unwrap(model) first."
            )
        if arguments.auto_wrap_policy is not None:
            plan = plan_units(
                module,
                arguments.auto_wrap_policy,
                ignored_modules=set(ignored.modules),
                ignored_params=set(ignored.params),
                root_kwargs=_child_kwargs(arguments, options, ignored),
                is_wrapped=lambda child: unit_of(child) is not None,
            )
            _check_overrides(plan)
        lines = describe_structure(module, [unit.fqn for unit in plan.units], options, ignored)
    except Exception as raised:
        error = raised
    agree_on_structure(lines, error, options.groups, options.device)
    group = options.groups.primary.group
    call = _count_call(group)
    tensors = (*module.parameters(), *module.buffers())
    (on_meta,) = true_on_any_rank([any(t.is_meta for t in tensors)], options.groups.rank_groups, options.device)
    modules = [unit.module for unit in plan.units]
    owners = owners_of_ties(module, modules, ignored.params.__contains__)
    if any(param.is_meta for param in owners):
        _materialize_ties(module, owners, options, ignored)
        owners = owners_of_ties(module, modules, ignored.params.__contains__)
    named: list[tuple[str, torch.Tensor]] = [
        (clean_fqn(path), param)
        for path, param in module.named_parameters()
        if param not in ignored.params and not getattr(param, "_fsdp_flattened", False)
    ]
    if options.sync_states != "warn":
        named += own_buffers(module, ignored)
    if on_meta:
        # Values are compared where every rank has some; those of the others once they are initialised.
        is_meta = true_on_any_rank([tensor.is_meta for _, tensor in named], options.groups.rank_groups, options.device)
        named = [entry for entry, left_out in zip(named, is_meta, strict=True) if not left_out]
    broadcast = agree_on_weights(named, options.sync_states, options.groups, options.device)
    names = {unit.module: unit.fqn for unit in plan.units}

    def wrapper(child: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
        unit_id = digest_of(f"{call}/{names[child]}".encode())
        return make_child(
            child, Arguments(**kwargs), Inherited(owners, broadcast, on_meta, names[child], unit_id, group)
        )

    apply_plan(module, plan, wrapper)
    for exempt in plan.full_precision:
        keep_full_precision(exempt)
    # The id of the root has no name in it: that is the class, which may differ between ranks.
    return ignored, Inherited(owners, broadcast, on_meta, name, digest_of(f"{call}/".encode()), group)


def _check_overrides(plan: WrapPlan) -> None:
    known = {field.name for field in fields(Arguments)}
    for unit in plan.units:
        unknown = sorted(set(unit.kwargs) - known)
        if unknown:
            raise OptionError(
                f"The policy gave unit {unit.fqn!r} the argument {unknown[0]!r}, which FullyShardedDataParallel does "
                f"not have. Its arguments are {', '.join(sorted(known))}."
            )


def _child_kwargs(arguments: Arguments, options: UnitOptions, ignored: Ignored) -> dict[str, Any]:
    groups = options.groups
    made_here = options.strategy.is_hybrid and groups.mesh is None
    process_group = (groups.shard.group, groups.replicate.group) if made_here else arguments.process_group
    return replace(
        arguments,
        process_group=process_group,
        auto_wrap_policy=None,
        ignored_modules=None,
        ignored_states=set(ignored.params),
    ).as_kwargs()


def _materialize_ties(
    module: nn.Module, owners: dict[nn.Parameter, nn.Module], options: UnitOptions, ignored: Ignored
) -> None:
    holders = [
        (clean_fqn(path), child)
        for path, child in module.named_modules()
        if any(param in owners for param in child._parameters.values() if param is not None)
    ]
    materialize(
        holders, root=module, ignored_params=ignored.params, device=options.device, init_fn=options.param_init_fn
    )
