"""Builds units: collects, groups, flattens and shards the parameters of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.comm import ErrorTexts, agree, digest_of, true_on_any_rank
from fsdp_flat.errors import OptionError, some_of
from fsdp_flat.flat import (
    FlatParamHandle,
    HandleSpec,
    ManagedParam,
    adapter_if_dtensor,
    adapter_of,
    check_adapter,
    collect_params,
    inside_wrappers,
    to_local_param,
)
from fsdp_flat.layout import FLAT_PARAM, clean_fqn, join_fqn
from fsdp_flat.runtime.conversion import hide_compiled_name
from fsdp_flat.runtime.materialize import (
    Unwritten,
    agree_on_weights,
    broadcast_from_rank_zero,
    is_marked,
    materialize,
    move_to_device,
)
from fsdp_flat.runtime.options import Ignored, Precision, UnitOptions
from fsdp_flat.runtime.tensors import BufferCasts, StoredTensors, keep_full_precision
from fsdp_flat.runtime.unit import Unit, unit_of, units_of
from fsdp_flat.user_warnings import warn_user
from fsdp_flat.wrap import warn_no_forward

Owners = Mapping[nn.Parameter, nn.Module]
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
    """Holds the facts that units built by one constructor call share.

    Attributes:
        number: number of the call in its process group.
        owners: for parameters shared between units, the module whose unit manages them.
        broadcast: units overwrite their tensors with those of rank 0.
        on_meta: on some rank a part of the model is on the meta device.
    """

    number: int
    owners: Owners
    broadcast: bool
    on_meta: bool


def build_unit(
    module: nn.Module,
    name: str,
    options: UnitOptions,
    ignored: Ignored,
    nested: Sequence[Unit],
    call: Construction,
    unit_id: int,
) -> Unit:
    """Build a unit from ``module``, whose nested units are already built, and shard its parameters in place.

    Every rank of the unit's groups must call this in the same order of units.

    Raises:
        OptionError: the parameters cannot be flattened together.
        TiedParameterError: another unit already manages a parameter.
    """
    warn_no_forward(module, name)
    modules = [
        (path, child) for path, child in _own_modules(module) if child not in ignored.modules and unit_of(child) is None
    ]
    params = _initialised_params(modules, module, name, options, ignored, nested, call)
    unwritten = _unwritten_buffers(modules) if call.on_meta else []
    unwritten_params = {entry.fqn for entry in params if is_marked(entry.param)} if call.on_meta else set()
    full_precision = [child for _, child in modules if options.precision.is_full_in(child)]
    _warn_of_statistics(modules, name, options.precision)
    handles = handles_of(params, module, name, options)
    low = [child for _, child in modules if child not in full_precision]
    buffers = BufferCasts(module, low, options.precision.buffer_dtype)
    stored = StoredTensors(child for _, child in modules)
    unit = Unit(module, name, options, handles, ignored, buffers, stored, unit_id)
    for inner in nested:
        inner.is_nested = True
    unwritten += [
        Unwritten(param_info.fqn, partial(handle.views.local, index), is_param=True)
        for handle in handles
        for index, param_info in enumerate(handle.layout.param_infos)
        if param_info.fqn in unwritten_params
    ]
    unit.unwritten = unwritten if call.on_meta else None
    for child in full_precision:
        own = next((param.dtype for param in child.parameters(recurse=False) if param.is_floating_point()), None)
        keep_full_precision(child, options.precision.master_dtype or own or torch.float32)
    for _, child in modules:
        # torch.compile and transformers read these two attributes of every managed submodule.
        child.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=options.use_orig_params)
        hide_compiled_name(child)
    for child in {site.module for entry in params for site in entry.sites}:
        # A module without this mark can be wrapped again: it holds no parameters, or nested units have them.
        child.__dict__["_fsdp_has_managed_params"] = True
    return unit


def build_rows(
    members: Sequence[nn.Module],
    options: UnitOptions,
    ignored: Ignored,
    place: Callable[[nn.Parameter], tuple[UnitOptions, int]],
) -> Unit:
    """Build the unit of modules whose parameters are sharded one by one, without communication.

    Parameters with other options, of another mesh, are in further units, inside the one that is returned.
    Every rank must call this in the same order. Parameters on the meta device stay there.

    Args:
        members: the modules; nested units are already built.
        options: validated options, with ``rows``.
        ignored: parameters that are not managed.
        place: returns the options of a parameter's unit, and the dim along which the parameter is sharded.

    Raises:
        OptionError: a parameter cannot be sharded.
        TiedParameterError: another unit already manages a parameter.
    """
    module = members[0] if len(members) == 1 else nn.ModuleList(members)
    name = ", ".join(type(member).__name__ for member in members)
    modules = [(path, child) for path, child in _own_modules(module) if unit_of(child) is None]
    move_to_device(modules, options, ignored)
    nested = units_of(module)
    _check_renormalisation(modules, options, ignored)
    # The outer unit, of the call's own mesh, comes first, also without parameters: the outermost unit's groups have to
    # be those of all ranks of the model.
    divided: dict[int, tuple[UnitOptions, list[ManagedParam]]] = {id(options): (options, [])}
    for entry in _managed_params(module, name, ignored, {}, nested):
        own, dim = place(entry.original)
        divided.setdefault(id(own), (own, []))[1].append(_adapted(replace(entry, dim=dim), own))
    for own, params in divided.values():
        assert own.rows is not None
        own.rows.dims_of(params)  # raises before any parameter is replaced
    units, shared = [], tuple(members)
    for own, params in divided.values():
        unit_id = digest_of(f"{count_call(own.groups.primary.group)}/rows".encode())
        full_name = name + own.suffix
        handles = handles_of(params, module, full_name, own)
        stored = StoredTensors(child for _, child in modules)
        unit = Unit(module, full_name, own, handles, ignored, BufferCasts(module, (), None), stored, unit_id)
        unit.members = shared
        units.append(unit)
    outer, *inner = units
    outer.inner = tuple(inner)
    for each in inner:
        each.use_context(outer.context)
    for each in (*inner, *nested):
        each.is_nested = True
    return outer


def _adapted(entry: ManagedParam, options: UnitOptions) -> ManagedParam:
    groups = [rank_group.group for rank_group in options.groups.rank_groups if rank_group.group is not None]
    assert options.rows is not None
    return options.rows.adapted(entry, groups)


def _initialised_params(
    modules: Sequence[tuple[str, nn.Module]],
    module: nn.Module,
    name: str,
    options: UnitOptions,
    ignored: Ignored,
    nested: Sequence[Unit],
    call: Construction,
) -> list[ManagedParam]:
    """Move the tensors of ``modules`` to the compute device, initialise them on all ranks alike; return parameters."""
    was_meta, params, error = False, [], None
    rank_groups, device, broadcast = options.groups.rank_groups, options.device, call.broadcast
    try:
        was_meta = call.on_meta and materialize(modules, module, options, ignored)
        move_to_device(modules, options, ignored)
        params = _managed_params(module, name, ignored, call.owners, nested)
        _check_renormalisation(modules, options, ignored)
    except Exception as raised:
        error = raised
    if call.on_meta:
        # The caller's code (param_init_fn, reset_parameters) ran here and may have failed on one rank only.
        agree((), error, rank_groups, device, WRAPPING)
    elif error is not None:
        raise error
    # A model may be on the meta device on some ranks only; all ranks compare the values that these initialised.
    if call.on_meta and options.sync_states != "broadcast" and any(true_on_any_rank([was_meta], rank_groups, device)):
        named: list[tuple[str, torch.Tensor]] = [(entry.fqn, entry.param) for entry in params]
        named += own_buffers(module, ignored) if options.sync_states != "warn" else []
        broadcast = agree_on_weights(named, options.sync_states, options.groups, device)
    if broadcast:
        buffers = [adapter_if_dtensor(buffer).to_local(buffer) for _, _, _, buffer in _buffers(modules)]
        tensors = [entry.param for entry in params] + list({id(buffer): buffer for buffer in buffers}.values())
        with torch.no_grad():
            broadcast_from_rank_zero(tensors, options.groups)
    return params


def handles_of(
    params: Sequence[ManagedParam], module: nn.Module, name: str, options: UnitOptions
) -> list[FlatParamHandle]:
    """Create a handle for each flat parameter of a unit; the modules then hold this rank's local shards.

    Raises:
        OptionError: the parameters cannot be flattened together.
    """
    return [
        FlatParamHandle(group, _spec(name, module, group, options, full=full))
        for group, full in _grouped(params, name, options)
    ]


def _own_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of ``root``'s subtree outside nested units, breadth first, with their names."""
    queue: list[tuple[str, nn.Module]] = [("", root)]
    found: dict[nn.Module, str] = {}
    for name, module in queue:
        if module not in found and (module is root or unit_of(module) is None):
            found[module] = clean_fqn(name)
            queue += [(join_fqn(name, child), below) for child, below in module.named_children()]
    return [(name, module) for module, name in found.items()]


def _buffers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield FQN, module, name and buffer of each buffer."""
    for path, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield join_fqn(path, name), module, name, buffer


def own_buffers(root: nn.Module, ignored: Ignored) -> list[tuple[str, torch.Tensor]]:
    """Return names and buffers of ``root``'s subtree outside of nested units and ignored modules."""
    return [
        (clean_fqn(fqn), buffer)
        for fqn, module, _, buffer in _buffers(_own_modules(root))
        if module not in ignored.modules
        and buffer.layout is torch.strided
        and type(buffer.data) in (torch.Tensor, DTensor)
    ]


def _unwritten_buffers(modules: Sequence[tuple[str, nn.Module]]) -> list[Unwritten]:
    return [
        Unwritten(fqn, partial(module._buffers.get, name), is_param=False)
        for fqn, module, name, buffer in _buffers(modules)
        if is_marked(buffer)
    ]


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
            f"full precision), or buffer_dtype={precision.param_dtype}.",
            stacklevel=5,
        )
    rounded = [repr(path) for path, child in modules if precision.rounds_statistics_of(child)]
    if rounded:
        warn_user(
            f"Batch norm {some_of(rounded, 4)} of unit {name!r} updates its running statistics in "
            f"{precision.buffer_dtype}, which loses small changes. To keep it in full precision, pass "
            "MixedPrecision(full_precision_modules=(torch.nn.BatchNorm2d, ...)) or an auto_wrap_policy; to keep it in "
            "low precision, also pass _module_classes_to_ignore=().",
            stacklevel=5,
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


def _spec(
    name: str, module: nn.Module, group: Sequence[ManagedParam], options: UnitOptions, *, full: bool
) -> HandleSpec:
    shard, precision = options.groups.shard, options.precision
    device = group[0].param.device
    return HandleSpec(
        unit_name=name,
        module=inside_wrappers(module),
        rank=shard.rank,
        world_size=shard.size,
        num_ranks=options.groups.num_ranks,
        use_orig_params=options.use_orig_params,
        device=options.device if options.offload_params else device,
        shard_device=torch.device("cpu") if options.offload_params and device.type != "meta" else device,
        compute_dtype=precision.master_dtype if full else precision.param_dtype,
        reduce_dtype=precision.master_dtype if full else precision.reduce_dtype,
        master_dtype=precision.master_dtype,
        keep_reduce_dtype=precision.keep_low_precision_grads,
        rows=options.rows,
    )


def _managed_params(
    module: nn.Module, name: str, ignored: Ignored, owners: Owners, nested: Sequence[Unit]
) -> list[ManagedParam]:
    below = {
        (id(site.module), site.name)
        for unit in nested
        for handle in unit.handles
        for entry in handle.views.params
        for site in entry.sites
    }
    below.update((id(handle.spec.module), FLAT_PARAM) for unit in nested for handle in unit.handles)
    params = collect_params(
        module,
        unit_name=name,
        skip=lambda param: ignored.has(param) or (bool(owners) and owners.get(param, module) is not module),
        is_managed_below=lambda child, key: (id(child), key) in below,
    )
    return [to_local_param(entry) for entry in params]


def _grouped(params: Sequence[ManagedParam], name: str, options: UnitOptions) -> list[tuple[list[ManagedParam], bool]]:
    """Group parameters by flat parameter, each group with a flag for full precision.

    Groups differ in dtype, in requires_grad (so that frozen parameters cost no gradient), and in precision.
    """
    groups: dict[tuple[torch.dtype, bool, bool], list[ManagedParam]] = {}
    for entry in params:
        full = options.precision.is_full_in(entry.sites[0].module)
        groups.setdefault((entry.param.dtype, entry.param.requires_grad, full), []).append(entry)
    if not options.use_orig_params and len(groups) > 1:
        described = "; ".join(
            f"{dtype}, requires_grad={grad}{', full precision' if full else ''}: "
            f"{some_of([repr(entry.fqn) for entry in group], 4)}"
            for (dtype, grad, full), group in groups.items()
        )
        raise OptionError(
            f"With use_orig_params=False all parameters of a unit share one flat parameter, so they need one dtype and "
            f"one requires_grad; unit {name!r} has {described}. Pass use_orig_params=True, which allows any mix, or "
            "wrap them in units of their own."
        )
    return [(group, full) for (_, _, full), group in groups.items()]


def owners_of_ties(
    root: nn.Module, unit_modules: Sequence[nn.Module], is_ignored: Callable[[nn.Parameter], bool]
) -> dict[nn.Parameter, nn.Module]:
    """Map each parameter shared between future units, or held only by one that never runs, to its unit's module.

    The owner is the innermost future unit with a forward that contains all uses of the parameter, or the root. The tie
    is kept, because the outer unit is unsharded whenever an inner one runs.
    """
    chosen = set(unit_modules)
    chains: dict[nn.Module, list[tuple[nn.Module, ...]]] = {}

    def visit(module: nn.Module, chain: tuple[nn.Module, ...]) -> None:
        if module in chosen or module is root:
            chain = (*chain, module)
        known = chains.setdefault(module, [])
        if chain in known:
            return
        known.append(chain)
        for child in module.children():
            visit(child, chain)

    visit(root, ())
    places: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    for module, leading in chains.items():
        for param in module._parameters.values():
            if param is not None and not is_ignored(param):
                found = places.setdefault(param, [])
                found.extend([chain for chain in leading if chain not in found])
    owners: dict[nn.Parameter, nn.Module] = {}
    for param, found in places.items():
        if len({chain[-1] for chain in found}) > 1 or not _runs(found[0][-1]):
            common = [levels[0] for levels in zip(*found, strict=False) if len(set(levels)) == 1]
            owners[param] = next((module for module in reversed(common) if _runs(module)), common[0])
    return owners


def _runs(module: nn.Module) -> bool:
    """Return whether ``module`` has a forward, unlike containers (``nn.ModuleList``, ``nn.ParameterList``)."""
    return type(module).forward is not nn.Module.forward


def compared_names(root: nn.Module, ignored: Ignored) -> Callable[[str], str]:
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


def describe_structure(
    root: nn.Module,
    unit_names: Sequence[str],
    options: UnitOptions,
    ignored: Ignored,
    name_of: Callable[[str], str],
) -> list[str]:
    """Describe the model that this rank is about to build, one fact per line, for comparison between ranks.

    Raises:
        UnsupportedError: a parameter is of a kind that cannot be flattened.
        OptionError: a parameter is sharded by tensor parallelism over the ranks of its shard group.
    """
    groups = [rank_group.group for rank_group in options.groups.rank_groups if rank_group.group is not None]
    precision = options.precision
    lines = [
        f"strategy {options.strategy.member.name}, use_orig_params={options.use_orig_params}, "
        f"sync_module_states={options.sync_states!r}",
        f"mixed precision of {precision.param_dtype}, {precision.reduce_dtype}, {precision.master_dtype}",
    ]
    lines += [f"unit {name_of(name)!r}\tunit {name!r}" for name in unit_names]
    for name, param in root.named_parameters():
        if not ignored.has(param):
            fqn, shape = clean_fqn(name), "sharded already"
            # A nested unit already holds this rank's local shard; its shapes were compared when it was built.
            if not getattr(param, "_fsdp_flattened", False):
                shape = f"of shape {tuple(param.shape)}"
                check_adapter(adapter_of(param, fqn), fqn, groups)
            facts = f"{shape}, {param.dtype}, requires_grad={param.requires_grad}"
            lines.append(f"parameter {name_of(name)!r} {facts}\tparameter {fqn!r} {facts}")
    return lines
