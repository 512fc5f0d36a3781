"""Builds units from the constructor's arguments: validates, plans, compares between ranks, then builds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, member_of
from fsdp_flat.comm import ShardingGroups, Strategy, agree, digest_of, resolve_groups, strategy_from, true_on_any_rank
from fsdp_flat.errors import OptionError, OptionTypeError, TiedParameterError
from fsdp_flat.flat import FlattenedBy, modules_of, named_sites
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime.build import (
    WRAPPING,
    Construction,
    build_unit,
    compared_names,
    count_call,
    describe_structure,
    own_buffers,
    owners_of_ties,
)
from fsdp_flat.runtime.materialize import agree_on_weights, materialize
from fsdp_flat.runtime.options import (
    Ignored,
    UnitOptions,
    compute_device_from,
    offloads_params,
    precision_from,
    sync_states_from,
)
from fsdp_flat.runtime.tensors import keep_full_precision
from fsdp_flat.runtime.unit import Unit, unit_of, units_of
from fsdp_flat.user_warnings import warn_user
from fsdp_flat.wrap import WrapPlan, apply_plan, plan_units


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


def _options_from(arguments: Arguments) -> UnitOptions:
    """Return the validated options of a unit; other ranks, which may have been given valid ones, get an error too."""
    try:
        return _validated(arguments)
    except Exception as error:
        groups = _groups_despite_errors(arguments)
        if groups is not None:
            agree((), error, groups.rank_groups, compute_device_from(None)[0], WRAPPING)
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
    prefetch = arguments.backward_prefetch
    if prefetch is not None:
        prefetch = member_of(BackwardPrefetch, prefetch, "backward_prefetch", others=" or None")
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
            "NO_SHARD keeps full parameters on every rank; DistributedDataParallel does the same.",
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
        mixed_precision=arguments.mixed_precision or MixedPrecision(),
        cpu_offload=arguments.cpu_offload or CPUOffload(),
    )


def construct(module: nn.Module, arguments: Arguments, wrap_unit: Callable[[Unit], nn.Module]) -> Unit:
    """Build the unit of ``module``, and before it those of the submodules that the auto-wrap policy chooses.

    Every rank of the group must call this in the same order.

    Args:
        module: the module to wrap.
        arguments: the constructor's arguments.
        wrap_unit: makes the wrapper of a submodule's unit, which replaces the submodule.

    Raises:
        OptionError: (a ValueError) arguments or a model that cannot be used.
        OptionTypeError: (a TypeError) an argument of the wrong type.
        UsageError: (a RuntimeError) no process group, or tensors on several devices.
    """
    if not isinstance(module, nn.Module):
        raise OptionTypeError(f"module must be an nn.Module; got {type(module).__name__}.")
    options = _options_from(arguments)
    plan, ignored, compared = _agreed_plan(module, arguments, options)
    call = _prepare(module, plan, options, ignored)
    names = {unit.module: unit.fqn for unit in plan.units}
    # Most units have the same arguments: those of one call are validated once.
    known: dict[tuple[int, ...], tuple[Arguments, UnitOptions]] = {}

    def wrapper(child: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
        given = Arguments(**kwargs)
        key = tuple(id(value) for value in given.as_kwargs().values())
        if key not in known:
            known[key] = given, _options_from(given)
        _, own = known[key]
        nested = units_of(child)
        child_ignored = resolve_ignored(child, given.ignored_modules, given.ignored_states, nested)
        # Among the ranks of another group the id may identify another unit.
        same_ranks = own.groups.primary.group is options.groups.primary.group
        unit_id = digest_of(f"{call.number}/{compared[child]}".encode()) if same_ranks else 0
        return wrap_unit(build_unit(child, names[child], own, child_ignored, nested, call, unit_id))

    apply_plan(module, plan, wrapper)
    for exempt in plan.full_precision:
        keep_full_precision(exempt)
    # The id of the root has no name in it: that is the class, which may differ between ranks.
    unit_id = digest_of(f"{call.number}/".encode())
    return build_unit(module, type(module).__name__, options, ignored, units_of(module), call, unit_id)


def _agreed_plan(
    module: nn.Module, arguments: Arguments, options: UnitOptions
) -> tuple[WrapPlan, Ignored, dict[nn.Module, str]]:
    """Plan units, and compare the plan and the model with the other ranks; return the units' compared names too."""
    error: Exception | None = None
    plan = WrapPlan(())
    ignored = Ignored(frozenset(), frozenset())
    compared: dict[nn.Module, str] = {}
    lines: list[str] = []
    try:
        ignored = resolve_ignored(module, arguments.ignored_modules, arguments.ignored_states, units_of(module))
        _check_not_managed(module)
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
        name_of = compared_names(module, ignored)
        compared = {unit.module: name_of(unit.fqn) for unit in plan.units}
        lines = describe_structure(module, [unit.fqn for unit in plan.units], options, ignored, name_of)
    except Exception as raised:
        error = raised
    # A model whose shapes differ between ranks would abort the process inside the first collective.
    agree(lines, error, options.groups.rank_groups, options.device, WRAPPING)
    return plan, ignored, compared


def _check_not_managed(module: nn.Module) -> None:
    name = type(module).__name__
    if unit_of(module) is not None:
        raise OptionError(
            f"{name} is a FullyShardedDataParallel already. Use it as it is, wrap the modules inside it with an "
            "auto_wrap_policy when it is made, or take it apart with fsdp_flat.unwrap(model) first."
        )
    if any(child.__dict__.get("_fsdp_has_managed_params", False) for child in _outside_units(module)):
        raise OptionError(
            f"This {name} is part of a FullyShardedDataParallel already, which holds its parameters. Wrap inner "
            "modules before outer ones, or take the model apart with fsdp_flat.unwrap(model) first."
        )


def _prepare(module: nn.Module, plan: WrapPlan, options: UnitOptions, ignored: Ignored) -> Construction:
    """Find ties, materialize shared parameters, and compare initial weights with the other ranks."""
    number = count_call(options.groups.primary.group)
    rank_groups, device = options.groups.rank_groups, options.device
    # A module may have a named_parameters of its own that leaves some out.
    tensors = (each for child in modules_of(module) for each in (*child._parameters.values(), *child._buffers.values()))
    has_meta = any(each is not None and each.is_meta for each in tensors)
    (on_meta,) = true_on_any_rank([has_meta], rank_groups, device)
    modules = [unit.module for unit in plan.units]
    owners = owners_of_ties(module, modules, ignored.has)
    if any(param.is_meta for param in owners):
        holders = [
            (clean_fqn(path), child)
            for path, child in module.named_modules()
            if any(param in owners for param in child._parameters.values() if param is not None)
        ]
        materialize(holders, module, options, ignored)
        owners = owners_of_ties(module, modules, ignored.has)
    named: list[tuple[str, torch.Tensor]] = [
        (clean_fqn(path), param)
        for path, param in module.named_parameters()
        if not ignored.has(param) and not getattr(param, "_fsdp_flattened", False)
    ]
    if options.sync_states != "warn":
        named += own_buffers(module, ignored)
    if on_meta:
        # Values are compared where every rank has some; those of the others once they are initialised.
        is_meta = true_on_any_rank([tensor.is_meta for _, tensor in named], rank_groups, device)
        named = [entry for entry, left_out in zip(named, is_meta, strict=True) if not left_out]
    broadcast = agree_on_weights(named, options.sync_states, options.groups, device)
    return Construction(number, owners, broadcast, on_meta)


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
    groups, process_group = options.groups, arguments.process_group
    if options.strategy.is_hybrid and groups.mesh is None:
        process_group = (groups.shard.group, groups.replicate.group)
    params = set(ignored.params)
    return replace(
        arguments, process_group=process_group, auto_wrap_policy=None, ignored_modules=None, ignored_states=params
    ).as_kwargs()


def resolve_ignored(root: nn.Module, ignored_modules: Any, ignored_states: Any, nested: Sequence[Unit]) -> Ignored:
    """Validate the two arguments of ``root``'s wrapper and expand modules to their subtrees.

    Units inside an ignored module stay units. Everything that the ``nested`` units of ``root`` ignore is ignored too.

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
    inherited = [unit.ignored for unit in nested]
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
