"""Builds units: collects, groups, flattens and shards the parameters of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.comm import ErrorTexts, agree, digest_of, true_on_any_rank, unrecorded
from fsdp_flat.core import (
    ManagedParam,
    ParamGroup,
    ParamGroupSpec,
    is_managed,
    is_subclass,
    local_of,
    plain_tensors_in,
)
from fsdp_flat.core.casts import BufferCasts, keep_full_precision
from fsdp_flat.core.group_collectives import GroupCollectives
from fsdp_flat.core.options import Ignored, Precision, UnitOptions
from fsdp_flat.core.quantized import constants_of, load_constants, quant_state_of
from fsdp_flat.core.step import Step
from fsdp_flat.core.unit import Unit, unit_of, units_of
from fsdp_flat.errors import OptionError, some_of
from fsdp_flat.layout import clean_fqn, join_fqn
from fsdp_flat.runtime.materialize import (
    Unwritten,
    agree_on_weights,
    broadcast_from_rank_zero,
    is_marked,
    materialize,
    move_to_device,
    unwritten_params,
)
from fsdp_flat.runtime.optimizer_steps import watch_steps_on
from fsdp_flat.runtime.param_walk import inside_wrappers, managed_sites, to_local_param, unit_params
from fsdp_flat.runtime.unit_record import unit_record
from fsdp_flat.runtime.unwrap import hide_compiled_name
from fsdp_flat.user_warnings import warn_user

WRAPPING = ErrorTexts(
    "wrapping", "Ranks were given different models.", "Build the same model with the same policy on every rank."
)


# Number of constructor calls by process group, counted once all its ranks have agreed to continue.
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def count_call(group: dist.ProcessGroup | None) -> int:
    """Return the number of this constructor call among those of its process group."""
    if group is None:
        return 0
    _calls[group] = _calls.get(group, 0) + 1
    return _calls[group]


@dataclass(frozen=True, slots=True)
class Construction:
    """Holds the facts that units built by one constructor call share."""

    number: int
    # For parameters shared between units, the module whose unit manages them.
    owners: Mapping[nn.Parameter, nn.Module]
    # Units overwrite their tensors with those of rank 0.
    broadcast: bool
    # On some rank a part of the model is on the meta device.
    on_meta: bool


def initialise(
    module: nn.Module,
    options: UnitOptions,
    ignored: Ignored,
    call: Construction,
    find: Callable[[], list[ManagedParam]],
) -> list[ManagedParam]:
    """Give the tensors of a unit memory and values, those of rank 0 if it broadcasts; return what ``find`` then finds.

    Every rank of the unit's groups must call this. An error of one rank is raised on all.
    """
    modules, groups = own_modules(module, ignored), options.groups
    try:
        was_meta = call.on_meta and materialize(modules, module, options, ignored)
        move_to_device(modules, options, ignored)
        params = find()
    except Exception as error:
        if call.on_meta:
            # The caller's code (param_init_fn, reset_parameters) ran here and may have failed on this rank only.
            agree((), error, groups.rank_groups, WRAPPING)
        raise
    named = synced_tensors([(entry.fqn, entry.param) for entry in params], modules, options)
    broadcast = call.broadcast
    if call.on_meta:
        # That code may have made other tensors on the ranks where it ran.
        told = [(f"{each.dtype} {tuple(each.shape)}", name) for name, each in named]
        lines = [f"{facts}\t{name!r} of {facts}" for facts, name in told]
        agree(lines, None, groups.rank_groups, WRAPPING)
        # All compare the values that these initialised.
        if options.sync_states != "broadcast" and any(true_on_any_rank([was_meta], groups.rank_groups)):
            broadcast = agree_on_weights(named, options.sync_states, groups)
    if broadcast:
        broadcast_from_rank_zero([each for _, each in named], groups)
    return params


def build_unit(
    module: nn.Module,
    name: str,
    options: UnitOptions,
    *,
    ignored: Ignored,
    nested: Sequence[Unit],
    call: Construction,
    unit_id: int,
) -> Unit:
    """Build a unit from ``module``, whose nested units are already built, and shard its parameters in place.

    Every rank of the unit's groups must call this in the same order of units.
    """
    modules, precision = own_modules(module, ignored), options.precision

    def find() -> list[ManagedParam]:
        _check_renormalisation(modules, options, ignored)
        found = unit_params(module, name, ignored, call.owners, nested)
        return [to_local_param(entry, takes_subclasses=False) for entry in found]

    params = initialise(module, options, ignored, call, find)
    options = _on_device_of(params, nested, options)
    marked = {entry.fqn for entry in params if is_marked(entry.param)} if call.on_meta else set()
    full_precision = [child for _, child in modules if precision.is_full_in(child)]
    _warn_of_container(module, name, modules, call.owners)
    _warn_of_statistics(modules, name, precision)
    quantized = _prepare_quantized(module)
    param_groups = build_param_groups(params, module, name, options, unit_id)
    low = [child for _, child in modules if child not in full_precision]
    casts, own = BufferCasts(module, low, precision.buffer_dtype), tuple(child for _, child in modules)
    unit = Unit(module, name, options, param_groups, ignored, casts, own, (module,), unit_id, Step(options.device))
    record = unit_record(unit)
    record.undo += quantized
    for inner in nested:
        unit_record(inner).is_nested = True
    if call.on_meta:
        record.unwritten = [
            each for param_group in param_groups for each in unwritten_params(unit, param_group) if each.fqn in marked
        ]
        record.unwritten += [
            Unwritten(join_fqn(path, key), partial(child._buffers.get, key), is_param=False)
            for path, child in modules
            for key, buffer in child._buffers.items()
            if buffer is not None and is_marked(buffer)
        ]
    for child in full_precision:
        dtype = next((param.dtype for param in child.parameters(recurse=False) if param.is_floating_point()), None)
        keep_full_precision(child, precision.master_dtype or dtype or torch.float32)
    for _, child in modules:
        # torch.compile and transformers read these two attributes of every managed submodule.
        child.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=options.use_orig_params)
        hide_compiled_name(child)
    _mark_holders(params, name)
    return unit


def _on_device_of(params: Sequence[ManagedParam], nested: Sequence[Unit], options: UnitOptions) -> UnitOptions:
    """Return options with the accelerator on which ``param_init_fn`` has put the parameters, if no other was chosen."""
    found = [entry.param.device for entry in params] or [unit.options.device for unit in nested]
    if options.device_given or options.device.type != "cpu" or not found or found[0].type in ("cpu", "meta"):
        return options
    return replace(options, device=found[0])


def _mark_holders(params: Iterable[ManagedParam], unit_name: str) -> None:
    # A module without this mark can be wrapped again: it holds no parameters, or nested units have them.
    for child in {site.module for entry in params for site in entry.sites}:
        child.__dict__["_fsdp_has_managed_params"] = unit_name


def outer_holder_in(module: nn.Module) -> tuple[str, str, nn.Module] | None:
    """Return a module at or below ``module`` whose parameters a unit around ``module`` manages: path, unit, module."""
    below = {holder for holder, _ in managed_sites(units_of(module))}
    for path, child in own_modules(module):
        if child not in below and "_fsdp_has_managed_params" in child.__dict__:
            return path, child.__dict__["_fsdp_has_managed_params"], child
    return None


# By class of torch's FSDPs, what shards its parameters. A module inside of one has FSDP1's mark alone.
_TORCHS = {"FullyShardedDataParallel": "torch's FullyShardedDataParallel", "FSDPModule": "torch's fully_shard"}


def check_not_torchs(module: nn.Module, ignored: Ignored) -> None:
    """Raise an OptionError if torch's FSDP shards a parameter below ``module`` that is not ignored."""
    for path, child in own_modules(module, ignored):
        kinds = [each.__name__ for each in type(child).__mro__ if each.__module__.startswith("torch.distributed.fsdp")]
        by = next((_TORCHS[name] for name in kinds if name in _TORCHS), "")
        params = list(child.parameters()) if by else []
        if not by and child.__dict__.get("_is_fsdp_managed_module", False):
            by = "torch's FSDP"
            params = [each for each in child._parameters.values() if each is not None]
            params = [each for each in params if isinstance(each, DTensor) or hasattr(each, "_fsdp_flattened")]
        if any(not is_managed(each) and not ignored.has(each) for each in params):
            what = f"{path!r} of {type(module).__name__}" if path else type(module).__name__
            raise OptionError(
                f"{what} is sharded by {by} already. One of the two libraries can shard a parameter. Call fsdp_flat's "
                "for all of the model: fsdp_flat.install(fully_shard=True) before the imports, or python -m "
                "fsdp_flat.run --fully-shard, replaces torch's names. Or leave the module out: ignored_modules of "
                "FullyShardedDataParallel, ignored_params of fully_shard."
            )


def check_outside_units(module: nn.Module) -> None:
    """Raise if a module to be sharded holds parameters of a unit around it, which was made before.

    With use_orig_params=False the module shows no parameters then, so that its unit would be empty, as in FSDP1: a
    warning.
    """
    held = outer_holder_in(module)
    if held is None:
        return
    path, unit_name, child = held
    where = f" of its {path!r}" if path else ""
    text = (
        f"This {type(module).__name__} is part of unit {unit_name!r} already, which "
        f"was made before, of a module around it, and holds the parameters{where}. Shard inner modules before outer "
        "ones, and modules that share one as one unit"
    )
    if child.__dict__.get("_fsdp_use_orig_params", True):
        raise OptionError(f"{text}, or take the outer one apart with fsdp_flat.unwrap(model) first.")
    warn_user(f"{text}; the unit made now has none of them.")


def build_per_param(
    members: Sequence[nn.Module],
    options: UnitOptions,
    ignored: Ignored,
    place: Callable[[nn.Parameter], tuple[UnitOptions, int]],
) -> Unit:
    """Build the unit of modules whose parameters are sharded one by one, without communication.

    For each parameter ``place`` returns the options of its mesh, and the dim along which it is sharded. Every rank must
    call this in the same order. Parameters on the meta device stay there.
    """
    module = members[0] if len(members) == 1 else nn.ModuleList(members)
    name = ", ".join(type(member).__name__ for member in members)
    modules = own_modules(module)
    move_to_device(modules, options, ignored)
    nested = units_of(module)
    _check_renormalisation(modules, options, ignored)
    # The call's own mesh comes first, also without parameters: the outermost unit's groups have to be those of all
    # ranks of the model.
    divided: dict[int, tuple[UnitOptions, list[ManagedParam]]] = {id(options): (options, [])}
    for found in unit_params(module, name, ignored, {}, nested):
        entry = to_local_param(found, takes_subclasses=True)
        own, dim = place(entry.original)
        assert own.per_param is not None
        adapted = own.per_param.adapted(replace(entry, dim=dim), process_groups(own))
        divided.setdefault(id(own), (own, []))[1].append(adapted)
    for own, params in divided.values():
        assert own.per_param is not None
        own.per_param.dims_of(params)  # raises before any parameter is replaced
    quantized = _prepare_quantized(module)
    unit_ids, param_groups = [], []
    for own, params in divided.values():
        unit_ids.append(digest_of(f"{count_call(own.groups.primary.group)}/rows".encode()))
        full_name = name + own.mesh_suffix
        param_groups += build_param_groups(params, module, full_name, own, unit_ids[-1])
        _mark_holders(params, full_name)
    casts, own_children = BufferCasts(module, (), None), tuple(child for _, child in modules)
    step = Step(options.device)
    unit = Unit(module, name, options, param_groups, ignored, casts, own_children, tuple(members), unit_ids[0], step)
    unit_record(unit).undo += quantized
    for each in nested:
        unit_record(each).is_nested = True
    return unit


def process_groups(options: UnitOptions) -> list[dist.ProcessGroup]:
    """Return the groups over which a unit shards and replicates."""
    return [rank_group.group for rank_group in options.groups.rank_groups if rank_group.group is not None]


def build_param_groups(
    params: Sequence[ManagedParam], module: nn.Module, name: str, options: UnitOptions, unit_id: int = 0
) -> list[ParamGroup]:
    """Create a parameter group for each flat parameter of a unit; the modules then hold this rank's local shards.

    ``unit_id`` is the id of the unit and mesh in messages between ranks.

    Flat parameters differ in dtype, in requires_grad (so that frozen parameters cost no gradient), and in precision:
    codes of quantized parameters may be stored in floating-point tensors, and no cast keeps them.
    Tensors of other classes, which cannot be parts of a flat one, are in groups of their own.
    """
    shard, precision = options.groups.shard, options.precision
    groups: dict[tuple[torch.dtype, bool, bool, bool, bool], list[ManagedParam]] = {}
    for entry in params:
        if options.use_orig_params and entry.param.is_inference():
            raise OptionError(
                f"Parameter {entry.fqn!r} of unit {name!r} was created inside torch.inference_mode(), so it could "
                "never be trained. Create the model outside of it; it may be wrapped and called inside."
            )
        dtype, full = entry.param.dtype, precision.is_full_in(entry.sites[0].module)
        casts = (precision.master_dtype if full else precision.param_dtype) not in (None, dtype)
        codes = casts and quant_state_of(entry.param) is not None
        kind = dtype, entry.param.requires_grad, full, codes, is_subclass(entry.param.data)
        groups.setdefault(kind, []).append(entry)
    if not options.use_orig_params and len(groups) > 1:
        described = "; ".join(
            f"{dtype}, requires_grad={grad}{', full precision' if full else ''}{', quantized' if codes else ''}: "
            f"{some_of([repr(entry.fqn) for entry in group], 4)}"
            for (dtype, grad, full, codes, _), group in groups.items()
        )
        raise OptionError(
            f"With use_orig_params=False all parameters of a unit share one flat parameter, so they need one dtype and "
            f"one requires_grad; unit {name!r} has {described}. Pass use_orig_params=True, which allows any mix, or "
            "wrap them in units of their own."
        )
    param_groups = []
    for (_, _, full, codes, _), group in groups.items():
        device = group[0].param.device
        spec = ParamGroupSpec(
            unit_name=name,
            module=inside_wrappers(module),
            rank=shard.rank,
            world_size=shard.size,
            num_ranks=options.groups.num_ranks,
            use_orig_params=options.use_orig_params,
            device=options.device if options.offload_params else device,
            shard_device=torch.device("cpu") if options.offload_params and device.type != "meta" else device,
            compute_dtype=None if codes else precision.master_dtype if full else precision.param_dtype,
            reduce_dtype=precision.master_dtype if full else precision.reduce_dtype,
            master_dtype=precision.master_dtype,
            keep_reduce_dtype=precision.keep_low_precision_grads,
            per_param=options.per_param,
            rank_groups=options.groups.rank_groups,
        )
        with unrecorded():
            param_groups.append(ParamGroup(group, spec))
        param_groups[-1].comm = GroupCollectives(options, unit_id, name)
        watch_steps_on(param_groups[-1])
    return param_groups


def own_modules(root: nn.Module, ignored: Ignored | None = None) -> list[tuple[str, nn.Module]]:
    """Return the modules of ``root``'s subtree outside units and ignored modules, breadth first, with names."""
    queue: list[tuple[str, nn.Module]] = [("", root)]
    found: dict[nn.Module, str] = {}
    for name, module in queue:
        if module not in found and unit_of(module) is None:
            found[module] = clean_fqn(name)
            queue += [(join_fqn(name, key), child) for key, child in module._modules.items() if child is not None]
    left_out = () if ignored is None else ignored.modules
    return [(name, module) for module, name in found.items() if module not in left_out]


def synced_tensors(
    params: Sequence[tuple[str, torch.Tensor]], modules: Iterable[tuple[str, nn.Module]], options: UnitOptions
) -> list[tuple[str, torch.Tensor]]:
    """Return by name the plain tensors of ``params``, and buffers, that ranks compare or rank 0 broadcasts."""
    found = [(fqn, each) for fqn, param in params for each in plain_tensors_in(local_of(param))]
    found += [(f"{fqn}.{name}", each) for fqn, param in params for name, each in constants_of(param).items()]
    for path, module in modules if options.sync_states != "warn" else ():
        found += [(join_fqn(path, name), each) for name, each in module._buffers.items() if each is not None]
    return found


def _warn_of_container(
    module: nn.Module, name: str, modules: Sequence[tuple[str, nn.Module]], owners: Mapping[nn.Parameter, nn.Module]
) -> None:
    """Warn of a container with parameters that is never called, so they are never unsharded, or in an outer unit."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is not nn.Module.forward:
        return
    holders = {owners.get(param) for _, child in modules for param in child._parameters.values() if param is not None}
    what = f"Unit {name!r} wraps a {type(module).__name__}, which has no forward, so"
    if module in holders:
        warn_user(f"{what} its parameters are never gathered. Wrap its entries, or the module that calls them.")
    elif holders - {None}:  # without those of ignored parameters
        warn_user(f"{what} its parameters are in the unit around it. Wrap its entries to have units of them.")


def _warn_of_statistics(modules: Sequence[tuple[str, nn.Module]], name: str, precision: Precision) -> None:
    """Warn of batch norms that cannot run in low precision, or that lose statistics there.

    An auto-wrap policy makes each a separate unit in full precision; this warning is for models without a policy.
    """
    asked = precision.full_precision_modules
    full = [repr(path) for path, child in modules if precision.is_full_in(child) and not isinstance(child, asked)]
    if full:
        warn_user(
            f"Batch norm {some_of(full, 4)} of unit {name!r} stays in full precision, inputs cast to it and outputs "
            f"back: its running statistics are not in {precision.param_dtype}, so its parameters cannot be. To choose "
            "yourself, pass MixedPrecision(full_precision_modules=...), an auto_wrap_policy (which makes it a unit in "
            f"full precision), or buffer_dtype={precision.param_dtype}."
        )
    rounded = [repr(path) for path, child in modules if precision.rounds_statistics_of(child)]
    if rounded:
        warn_user(
            f"Batch norm {some_of(rounded, 4)} of unit {name!r} updates its running statistics in "
            f"{precision.buffer_dtype}, which loses small changes. To keep it in full precision, pass "
            "MixedPrecision(full_precision_modules=(torch.nn.BatchNorm2d, ...)) or an auto_wrap_policy; to keep it in "
            "low precision, also pass _module_classes_to_ignore=()."
        )


def _check_renormalisation(modules: Sequence[tuple[str, nn.Module]], options: UnitOptions, ignored: Ignored) -> None:
    """Raise if an embedding writes to its weight in forward, when the weight is an all-gathered copy."""
    if options.groups.shard.size == 1 and options.precision.param_dtype is None:
        return
    for path, module in modules:
        renormalises = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        if renormalises and not ignored.has(module.weight):
            raise OptionError(
                f"max_norm={module.max_norm} of {path!r} ({type(module).__name__}) has it write to its weight in "
                "forward. The weight there is a copy, all-gathered for this forward, so the change would be lost. "
                "Leave the module out (ignored_modules), or do without max_norm and limit the norms inside "
                "summon_full_params after each step."
            )


def _prepare_quantized(root: nn.Module) -> list[Any]:
    """Have modules load the constants that they save, and leave their weights as they are; return how to undo it."""
    holders = [
        module
        for _, module in own_modules(root)
        if any(quant_state_of(each) is not None for each in module._parameters.values() if each is not None)
    ]
    for module in holders:
        if getattr(module, "support_avx512bf16_for_cpu", False):
            # In evaluation bitsandbytes would write codes in another order to the weight, which is a copy here, and the
            # order to the constants, which are not.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return [module.register_load_state_dict_pre_hook(load_constants) for module in holders]
