"""Builds units from the constructor's arguments: validates, plans, compares between ranks, then builds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import BackwardPrefetch, MixedPrecision, ShardingStrategy, flag, member_of
from fsdp_flat.comm import (
    ShardingGroups,
    Strategy,
    agree,
    digest_of,
    encoded,
    reported_failure,
    resolve_groups,
    strategy_from,
    true_on_any_rank,
)
from fsdp_flat.core import (
    adapter_of,
    check_adapter,
    is_managed,
    is_subclass,
    local_of,
    modules_of,
    owner_of,
)
from fsdp_flat.core.casts import keep_full_precision
from fsdp_flat.core.options import Ignored, UnitOptions
from fsdp_flat.core.quantized import find_constants, quantization_of
from fsdp_flat.core.unit import Unit, unit_of, units_of
from fsdp_flat.errors import OptionError, OptionTypeError, TiedParameterError
from fsdp_flat.layout import clean_fqn, join_fqn
from fsdp_flat.runtime.arguments import cpu_offload_from, precision_from, sync_states_from
from fsdp_flat.runtime.build import (
    WRAPPING,
    Construction,
    build_unit,
    check_not_torchs,
    check_outside_units,
    count_call,
    initialise,
    own_modules,
    process_groups,
    synced_tensors,
)
from fsdp_flat.runtime.compute_device import (
    compute_device_from,
    current_accelerator,
    default_device,
    devices_of,
    groups_from,
)
from fsdp_flat.runtime.materialize import agree_on_weights, materialize, unwritten_params
from fsdp_flat.runtime.param_walk import named_sites, unit_params
from fsdp_flat.runtime.unit_record import unit_record
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


_ARGUMENT_NAMES = tuple(field.name for field in fields(Arguments))


def _options_from(arguments: Arguments, default: Callable[[], tuple[torch.device, bool]]) -> UnitOptions:
    """Return the validated options of a unit; other ranks, which may have been given valid ones, get an error too.

    ``default`` returns the device without a ``device_id``, and whether CPU tensors move there.
    """
    try:
        return _validated(arguments, default)
    except Exception as error:
        with suppress(Exception):
            needs_two = isinstance(arguments.process_group, tuple) or getattr(arguments.device_mesh, "ndim", 1) == 2
            device = current_accelerator() or torch.device("cpu")
            try:
                strategy = _strategy_of(arguments)
            except OptionError:
                strategy = strategy_from(ShardingStrategy.HYBRID_SHARD if needs_two else None)
            agree((), error, _groups_of(arguments, strategy, device).rank_groups, WRAPPING)
        raise


def _groups_of(arguments: Arguments, strategy: Strategy, device: torch.device) -> ShardingGroups:
    group, mesh, has_policy = arguments.process_group, arguments.device_mesh, arguments.auto_wrap_policy is not None
    return resolve_groups(strategy, group, mesh, has_policy=has_policy, device=device)


def _strategy_of(arguments: Arguments) -> Strategy:
    """Return the requested strategy; by default that of the mesh: two dimensions mean hybrid sharding, as in FSDP2."""
    if arguments.sharding_strategy is None and getattr(arguments.device_mesh, "ndim", 1) == 2:
        return strategy_from(ShardingStrategy.HYBRID_SHARD)
    return strategy_from(arguments.sharding_strategy)


def _default_device(module: nn.Module, arguments: Arguments) -> tuple[torch.device, bool]:
    """Return the device for a module without a ``device_id``, and whether its CPU tensors move there."""
    ignored: set[nn.Parameter] = set()
    for given in (arguments.ignored_modules, arguments.ignored_states):
        for entry in given if isinstance(given, (list, tuple, set, frozenset)) else ():
            ignored.update(entry.parameters() if isinstance(entry, nn.Module) else [entry])
    own = devices_of([child for _, child in own_modules(module)], ignored)
    devices = own or [unit.options.device for unit in units_of(module)]
    groups = groups_from(arguments.process_group, arguments.device_mesh)
    offloads = getattr(arguments.cpu_offload, "offload_params", False) is True
    return default_device(devices, groups, offloads=offloads)


def _validated(arguments: Arguments, default: Callable[[], tuple[torch.device, bool]]) -> UnitOptions:
    strategy = _strategy_of(arguments)
    given = compute_device_from(arguments.device_id)
    device, device_given = default() if given is None else (given, True)
    precision = precision_from(arguments.mixed_precision)
    cpu_offload = cpu_offload_from(arguments.cpu_offload)
    prefetch = arguments.backward_prefetch
    if prefetch is not None:
        prefetch = member_of(BackwardPrefetch, prefetch, "backward_prefetch", others=" or None")
    sync_states = sync_states_from(arguments.sync_module_states)
    groups = _groups_of(arguments, strategy, device)
    if groups.num_ranks == 1 and strategy.member is not ShardingStrategy.NO_SHARD:
        warn_user(f"{strategy.member.name} over a single rank has nothing to shard; the strategy becomes NO_SHARD.")
        strategy = strategy_from(ShardingStrategy.NO_SHARD)
    elif strategy.member is ShardingStrategy.NO_SHARD and groups.num_ranks > 1:
        warn_user("NO_SHARD keeps full parameters on every rank; DistributedDataParallel does the same.", FutureWarning)
    return UnitOptions(
        strategy=strategy,
        groups=groups,
        device=device,
        device_given=device_given,
        use_orig_params=flag(arguments.use_orig_params, "use_orig_params"),
        backward_prefetch=prefetch,
        forward_prefetch=flag(arguments.forward_prefetch, "forward_prefetch"),
        limit_all_gathers=flag(arguments.limit_all_gathers, "limit_all_gathers"),
        sync_states=sync_states,
        precision=precision,
        offload_params=flag(cpu_offload.offload_params, "CPUOffload.offload_params"),
        param_init_fn=arguments.param_init_fn,
        mixed_precision=arguments.mixed_precision or MixedPrecision(),
        cpu_offload=cpu_offload,
    )


def construct(
    module: nn.Module,
    arguments: Arguments,
    wrap_unit: Callable[[Unit], nn.Module],
    shard_in_place: Callable[[nn.Module, UnitOptions, Ignored], object],
) -> Unit:
    """Build the unit of ``module``, and before it those of the submodules that the auto-wrap policy chooses.

    ``wrap_unit`` makes the wrapper of a submodule's unit. A module all of whose parameters are of other classes of
    tensors is sharded by ``shard_in_place``, and its wrapper has none. Every rank of the group must call this in the
    same order.
    """
    if not isinstance(module, nn.Module):
        raise OptionTypeError(f"module must be an nn.Module; got {type(module).__name__}.")
    default = functools.cache(functools.partial(_default_device, module, arguments))
    options = _options_from(arguments, default)
    plan, ignored, compared = _agreed_plan(module, arguments, options)
    # Ranks have agreed on the plan, and do so again where callers' code runs; another error may be of this rank alone.
    with reported_failure(options.groups.rank_groups):
        call = _prepare(module, plan, options, ignored)
        names = {unit.module: unit.fqn for unit in plan.units}

        def prepare(child: nn.Module, own: UnitOptions, ignored: Ignored, nested: list[Unit]) -> list[Unit]:
            """Shard a module in place if no flat parameter can have its parameters; return its nested units."""
            if not _has_subclasses_only(child, ignored):
                return nested
            initialise(child, own, ignored, call, lambda: unit_params(child, "", ignored, call.owners, nested))
            shard_in_place(child, own, ignored)
            unit = unit_of(child)
            if call.on_meta and unit is not None:
                unwritten = [each for group in unit.param_groups for each in unwritten_params(unit, group)]
                unit_record(unit).unwritten = unwritten
            return units_of(child)

        # Most units have the same arguments: those of one call are validated once.
        known: dict[tuple[int, ...], tuple[Arguments, UnitOptions]] = {}

        def wrapper(child: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
            given = Arguments(**kwargs)
            key = tuple([id(getattr(given, name)) for name in _ARGUMENT_NAMES])
            if key not in known:
                known[key] = given, _options_from(given, default)
            _, own = known[key]
            nested = units_of(child)
            child_ignored = resolve_ignored(child, given.ignored_modules, given.ignored_states, nested)
            nested = prepare(child, own, child_ignored, nested)
            # Among the ranks of another group the id may identify another unit.
            same_ranks = own.groups.primary.group is options.groups.primary.group
            unit_id = digest_of(encoded(f"{call.number}/{compared[child]}")) if same_ranks else 0
            return wrap_unit(
                build_unit(child, names[child], own, ignored=child_ignored, nested=nested, call=call, unit_id=unit_id)
            )

        apply_plan(module, plan, wrapper)
        for exempt in plan.full_precision:
            keep_full_precision(exempt)
        # The id of the root has no name in it: that is the class, which may differ between ranks.
        unit_id = digest_of(f"{call.number}/".encode())
        name = type(module).__name__
        nested = prepare(module, options, ignored, units_of(module))
        return build_unit(module, name, options, ignored=ignored, nested=nested, call=call, unit_id=unit_id)


def _has_subclasses_only(module: nn.Module, ignored: Ignored) -> bool:
    """Return whether a unit of ``module`` would have parameters, all of them of other classes of tensors."""
    held = [param for _, child in own_modules(module, ignored) for param in child._parameters.values()]
    own = [param for param in held if param is not None and not ignored.has(param) and not is_managed(param)]
    return bool(own) and all(is_subclass(local_of(param.data)) for param in own)


def _agreed_plan(
    module: nn.Module, arguments: Arguments, options: UnitOptions
) -> tuple[WrapPlan, Ignored, dict[nn.Module, str]]:
    """Plan units, and compare the plan and the model with the other ranks; return the units' compared names too."""
    rank_groups = options.groups.rank_groups
    try:
        ignored = resolve_ignored(module, arguments.ignored_modules, arguments.ignored_states, units_of(module))
        unit = unit_of(module)
        if unit is not None and not unit.options.api.has_wrapper:
            raise OptionError(
                f"{type(module).__name__} is sharded by fully_shard already. Use it as it is, or take it apart with "
                "fsdp_flat.unwrap(model) first."
            )
        check_outside_units(module)
        check_not_torchs(module, ignored)
        plan = WrapPlan(())
        if arguments.auto_wrap_policy is not None:
            inherited = {name: getattr(arguments, name) for name in _ARGUMENT_NAMES}
            inherited.update(auto_wrap_policy=None, ignored_modules=None, ignored_states=set(ignored.params))
            if options.strategy.is_hybrid and options.groups.mesh is None:
                inherited["process_group"] = (options.groups.shard.group, options.groups.replicate.group)
            plan = plan_units(
                module,
                arguments.auto_wrap_policy,
                ignored_modules=set(ignored.modules),
                ignored_params=set(ignored.params),
                root_kwargs=inherited,
                is_wrapped=lambda child: unit_of(child) is not None,
            )
            _check_overrides(plan)
        find_constants(modules_of(module))
        name_of = _compared_names(module, ignored)
        lines = _describe_structure(module, plan, options, ignored, name_of)
    except Exception as error:
        agree((), error, rank_groups, WRAPPING)
        raise
    # A model whose shapes differ between ranks would abort the process inside the first collective.
    agree(lines, None, rank_groups, WRAPPING)
    return plan, ignored, {planned.module: name_of(planned.fqn) for planned in plan.units}


def _prepare(module: nn.Module, plan: WrapPlan, options: UnitOptions, ignored: Ignored) -> Construction:
    """Find ties, materialize shared parameters, and compare initial weights with the other ranks."""
    number = count_call(options.groups.primary.group)
    rank_groups = options.groups.rank_groups
    # A module may have a named_parameters of its own that leaves some out.
    tensors = (each for child in modules_of(module) for each in (*child._parameters.values(), *child._buffers.values()))
    has_meta = any(each is not None and each.is_meta for each in tensors)
    (on_meta,) = true_on_any_rank([has_meta], rank_groups)
    modules = [unit.module for unit in plan.units]
    owners = owners_of_ties(module, modules, ignored.has)
    if any(param.is_meta for param in owners):
        named_modules = [(clean_fqn(path), child) for path, child in module.named_modules()]
        holders = [each for each in named_modules if not owners.keys().isdisjoint(each[1]._parameters.values())]
        materialize(holders, module, options, ignored)
        owners = owners_of_ties(module, modules, ignored.has)
    params = [
        (clean_fqn(path), param)
        for path, param in module.named_parameters()
        if not ignored.has(param) and not is_managed(param)
    ]
    named = synced_tensors(params, own_modules(module, ignored), options)
    if on_meta:
        # Values are compared where every rank has some; those of the others once they are initialised.
        is_meta = true_on_any_rank([tensor.is_meta for _, tensor in named], rank_groups)
        named = [entry for entry, left_out in zip(named, is_meta, strict=True) if not left_out]
    broadcast = agree_on_weights(named, options.sync_states, options.groups)
    return Construction(number, owners, broadcast, on_meta)


def _check_overrides(plan: WrapPlan) -> None:
    known = set(_ARGUMENT_NAMES)
    for unit in plan.units:
        unknown = sorted(set(unit.kwargs) - known)
        if unknown:
            raise OptionError(
                f"The policy gave unit {unit.fqn!r} the argument {unknown[0]!r}, which FullyShardedDataParallel does "
                f"not have. Its arguments are {', '.join(sorted(known))}."
            )


def resolve_ignored(root: nn.Module, ignored_modules: Any, ignored_states: Any, nested: Sequence[Unit]) -> Ignored:
    """Validate the two arguments of ``root``'s wrapper and expand modules to their subtrees.

    Units inside an ignored module stay units. Everything that the ``nested`` units of ``root`` ignore is ignored too.
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
    if all(isinstance(entry, nn.Module) for entry in states):
        modules, states = modules + states, []
    elif not all(isinstance(entry, nn.Parameter) for entry in states):
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
            warn_user("The module being wrapped is itself in the ignored set, so nothing of it will be sharded.")
    subtree = {child for module in modules for _, child in own_modules(module)}
    for site, param in named_sites(root) if subtree else ():
        owner = owner_of(param)
        if site.module in subtree and owner is not None:
            raise TiedParameterError(
                f"{site.fqn!r} of an ignored module is the same parameter as {owner.describe()}, which was wrapped "
                "before and holds a part of it now, so the tie would be cut. Ignore the parameter when that unit is "
                "wrapped too (ignored_states=[parameter]), or do not ignore the module."
            )
    params = [*states, *(param for module in subtree for param in module.parameters(recurse=False))]
    inherited = [unit.ignored for unit in nested]
    return Ignored(
        frozenset(subtree).union(*[entry.modules for entry in inherited]),
        frozenset(params).union(*[entry.params for entry in inherited]),
    )


def _listed(name: str, value: Any) -> list[Any]:
    try:
        return [] if value is None else list(value)
    except TypeError:
        raise OptionTypeError(f"{name} must be an iterable; got {type(value).__name__}.") from None


def _kinds(entries: list[Any]) -> str:
    return ", ".join(sorted({type(entry).__name__ for entry in entries}))


def owners_of_ties(
    root: nn.Module, unit_modules: Sequence[nn.Module], is_ignored: Callable[[nn.Parameter], bool]
) -> dict[nn.Parameter, nn.Module]:
    """Map each parameter shared between future units, or held only by one that never runs, to its unit's module.

    The owner is the innermost future unit with a forward that contains all uses of the parameter, or the root. The tie
    is kept, because the outer unit is unsharded whenever an inner one runs.
    """
    chosen = {root, *unit_modules}
    # For each module and parameter the chains of units, from the root inwards, that lead to it; an ordered set.
    chains: dict[nn.Module, dict[tuple[nn.Module, ...], None]] = {}
    places: dict[nn.Parameter, dict[tuple[nn.Module, ...], None]] = {}

    # No closure: one that calls itself keeps the parameters alive until the garbage collector runs.
    ahead: list[tuple[nn.Module, tuple[nn.Module, ...]]] = [(root, ())]
    while ahead:
        module, chain = ahead.pop()
        chain = (*chain, module) if module in chosen else chain
        known = chains.setdefault(module, {})
        if chain not in known:
            known[chain] = None
            for param in module._parameters.values():
                if param is not None and not is_ignored(param):
                    places.setdefault(param, {})[chain] = None
            ahead.extend([(child, chain) for child in reversed([*module.children()])])
    owners: dict[nn.Parameter, nn.Module] = {}
    for param, found in places.items():
        units = {chain[-1] for chain in found}
        if len(units) > 1 or not all(map(_runs, units)):
            common = [levels[0] for levels in zip(*found, strict=False) if len(set(levels)) == 1]
            owners[param] = next((module for module in reversed(common) if _runs(module)), common[0])
    return owners


def _runs(module: nn.Module) -> bool:
    """Return whether ``module`` has a forward, unlike containers (``nn.ModuleList``, ``nn.ParameterList``)."""
    return type(module).forward is not nn.Module.forward


def _compared_names(root: nn.Module, ignored: Ignored) -> Callable[[str], str]:
    """Return a function that converts a path below ``root`` to the name by which ranks compare what is there.

    Ranks may ignore different modules, which may shift the indices of their siblings: an index in such a name counts
    only children of which something is managed, or that have no parameters.
    """
    left_out = set(ignored.modules)
    for module in root.modules() if ignored.params else ():
        params = [*module.parameters()]
        if params and ignored.params.issuperset(params):
            left_out.add(module)
    indices: dict[str, str] = {}
    for path, parent in root.named_modules() if left_out else ():
        kept = [name for name, child in parent._modules.items() if child not in left_out]
        if len(kept) < len(parent._modules):
            indices.update({clean_fqn(join_fqn(path, n)): str(i) for i, n in enumerate(kept) if n.isdigit()})

    if not indices:
        return clean_fqn

    def name_of(path: str) -> str:
        parts = clean_fqn(path).split(".")
        return ".".join(indices.get(".".join(parts[: end + 1]), part) for end, part in enumerate(parts))

    return name_of


def _describe_structure(
    root: nn.Module, plan: WrapPlan, options: UnitOptions, ignored: Ignored, name_of: Callable[[str], str]
) -> list[str]:
    """Describe the model that this rank is about to build, one fact per line; raise if a parameter has no adapter."""
    groups, precision = process_groups(options), options.precision
    lines = [
        f"strategy {options.strategy.name}, use_orig_params={options.use_orig_params}, "
        f"sync_module_states={options.sync_states!r}",
        f"mixed precision of {precision.param_dtype}, {precision.reduce_dtype}, {precision.master_dtype}",
    ]
    lines += [f"unit {name_of(unit.fqn)!r}\tunit {unit.fqn!r}" for unit in plan.units]
    for name, param in root.named_parameters():
        if not ignored.has(param):
            fqn, shape = clean_fqn(name), "sharded already"
            # A nested unit already holds this rank's local shard; its shapes were compared when it was built.
            if not is_managed(param):
                shape = f"of shape {tuple(param.shape)}"
                check_adapter(adapter_of(param, fqn, takes_subclasses=True), fqn, groups)
            facts = f"{shape}, {param.dtype}, requires_grad={param.requires_grad}"
            if (way := quantization_of(param)) is not None:
                facts += f", quantized with {way}"
            lines.append(f"parameter {name_of(name)!r} {facts}\tparameter {fqn!r} {facts}")
    return lines
