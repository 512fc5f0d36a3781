"""Plans the units of a model for any number of ranks, without a process group, and counts their bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import ShardingStrategy, is_a
from fsdp_flat.comm import RankGroup, ShardingGroups, Strategy, strategy_from
from fsdp_flat.core import Ignored, ManagedParam, ParamGroup, PerParamLayout, UnitControl, UnitOptions, units_of
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.extras.describe import ModelDescription, UnitDescription, describe_tree, describe_unit
from fsdp_flat.runtime import (
    build_param_groups,
    collect_params,
    named_sites,
    owners_of_ties,
    precision_from,
    precision_of_policy,
    resolve_ignored,
)
from fsdp_flat.wrap import UnitPlan, plan_units

APIS = ("FullyShardedDataParallel", "fully_shard")


@dataclass(frozen=True, slots=True)
class PlannedHandle:
    """Counts the bytes of one flat parameter, or of the DTensors of a unit, on one rank.

    Attributes:
        shard: the shard of the parameters.
        gathered: the unsharded buffer; 0 if it is the shard.
        staging: memory beside the buffer while an all-gather is in flight.
        whole_grad: the gradient before its reduction.
        cast_grad: a copy of it in the dtype of the reduction; 0 if that is its own dtype.
        reduced: the sum that a reduction gives, in its own dtype; 0 if that is the memory of the whole gradient.
        grad: the gradient that the optimizer gets.
        num_shards, num_replicas: ranks of the shard group and of the replicate group.
        gather_row: what a rank sends to each other rank in an all-gather.
        reduce_row: what a rank sends to each other rank in a reduce-scatter.
        trainable: a gradient is reduced.
        params: the parameters, as the model before wrapping holds them.
        optimizer_params: the trainable parameters that an optimizer of rank 0 holds, on the meta device, each by (the
            first of) those of ``params`` that it is a shard of.
    """

    shard: int
    gathered: int
    staging: int
    whole_grad: int
    cast_grad: int
    reduced: int
    grad: int
    num_shards: int
    num_replicas: int
    gather_row: int
    reduce_row: int
    trainable: bool
    params: tuple[nn.Parameter, ...]
    optimizer_params: dict[nn.Parameter, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedUnit:
    """Describes one unit of a plan.

    Attributes:
        position: the index of its module among ``module.modules()``.
        reshard_after_forward: as ``UnitControl``'s.
        input_dtype: dtype to which floating-point inputs are cast; None for none.
        output_dtype: the same of outputs.
        compute_dtypes: the dtype in compute of each parameter, as the model before wrapping holds it.
    """

    name: str
    position: int
    handles: tuple[PlannedHandle, ...]
    reshard_after_forward: bool | None
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    compute_dtypes: dict[nn.Parameter, torch.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedModel:
    """Holds a model's planned units, the outermost first, and their description.

    Attributes:
        module: the module of the caller, unchanged.
        buffer_dtype: dtype of floating-point buffers in compute; None for their own.
        full_precision: indices, as ``PlannedUnit.position``, of modules that compute in full precision.
    """

    module: nn.Module
    units: tuple[PlannedUnit, ...]
    description: ModelDescription
    buffer_dtype: torch.dtype | None
    full_precision: frozenset[int]


@dataclass(frozen=True, slots=True)
class UnitArguments:
    """Holds the arguments of :func:`fsdp_flat.plan` that decide on units; see there."""

    num_ranks: int
    num_replicas: int
    sharding_strategy: Any
    auto_wrap_policy: Any
    mixed_precision: Any
    ignored_modules: Any
    ignored_states: Any
    use_orig_params: bool
    api: str
    offloads: bool
    is_accelerator: bool
    prefetches_forward: bool

    @property
    def has_rows(self) -> bool:
        """Parameters are sharded one by one, as ``fully_shard`` does."""
        return self.api == "fully_shard"


def planned_model(module: nn.Module, arguments: UnitArguments) -> PlannedModel:
    """Plan the units of ``module``, which stays as it is; raise an OptionError as wrapping would."""
    _check(arguments, strategy_from(arguments.sharding_strategy))
    if units_of(module):
        raise OptionError(
            f"{type(module).__name__} holds a FullyShardedDataParallel already; describe(model) shows it."
        )
    rows = arguments.has_rows
    root, ignored, originals = _meta_copy(
        module, resolve_ignored(module, arguments.ignored_modules, arguments.ignored_states, nested=())
    )
    kwargs = {
        "sharding_strategy": arguments.sharding_strategy,
        "mixed_precision": arguments.mixed_precision if is_a(arguments.mixed_precision, "MixedPrecision") else None,
        "use_orig_params": rows or arguments.use_orig_params,
    }
    units = [UnitPlan(type(module).__name__, root, kwargs)]
    options = _options(kwargs, arguments)
    full_precision = [each for each in root.modules() if options.precision.is_full_in(each)]
    if arguments.auto_wrap_policy is not None:
        wrapping = plan_units(
            root,
            arguments.auto_wrap_policy,
            ignored_modules=set(ignored.modules),
            ignored_params=set(ignored.params),
            root_kwargs=kwargs,
        )
        units += wrapping.units
        full_precision += wrapping.full_precision
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
    planned = []
    for unit, params in zip(units, collected, strict=True):
        own = _options(unit.kwargs, arguments)
        original = {entry.fqn: originals[entry.param] for entry in params}
        handles = build_param_groups(params, unit.module, unit.fqn, own)
        if rows:
            _use_rows(handles)
        chosen = strategy_from(unit.kwargs["sharding_strategy"])
        resharding = UnitControl.of(chosen if rows and chosen.shards else own.strategy).reshard_after_forward
        if handles:
            described[unit.module] = describe_unit(unit.fqn, own, handles, resharding)
        precision, is_root = own.precision, unit.module is root
        casts = precision.cast_forward_inputs or (is_root and precision.cast_root_forward_inputs)
        planned.append(
            PlannedUnit(
                unit.fqn,
                position[unit.module],
                tuple(_planned_handle(handle, own, original, arguments) for handle in handles),
                resharding,
                precision.param_dtype if casts else None,
                precision.output_dtype,
                {
                    original[param_info.fqn]: handle.compute_dtype
                    for handle in handles
                    for param_info in handle.layout.param_infos
                },
            )
        )
    description = describe_tree(described, root, options.groups)
    full = frozenset(position[module] for module in full_precision)
    return PlannedModel(module, tuple(planned), description, options.precision.buffer_dtype, full)


def _check(arguments: UnitArguments, strategy: Strategy) -> None:
    """Raise if the numbers of ranks and of replicas do not fit each other or the strategy."""
    num_ranks, num_replicas = arguments.num_ranks, arguments.num_replicas
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
    if arguments.api not in APIS:
        raise OptionError(f"api must be one of {', '.join(map(repr, APIS))}; got {arguments.api!r}.")


def _meta_copy(module: nn.Module, ignored: Ignored) -> tuple[nn.Module, Ignored, dict[nn.Parameter, nn.Parameter]]:
    """Return a copy of ``module`` on the meta device, what is ignored in it, and the original of each parameter."""
    params = {
        param: nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        for param in (*module.parameters(), *ignored.params)
    }
    buffers = {buffer: torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    copies: dict[int, Any] = {id(tensor): twin for tensor, twin in (*params.items(), *buffers.items())}
    root = copy.deepcopy(module, copies)
    modules = dict(zip(module.modules(), root.modules(), strict=True))
    ignored_copies = Ignored(
        frozenset(modules[child] for child in ignored.modules if child in modules),
        frozenset(params[param] for param in ignored.params),
    )
    return root, ignored_copies, {twin: param for param, twin in params.items()}


def _options(kwargs: dict[str, Any], arguments: UnitArguments) -> UnitOptions:
    """Return the options of a unit on rank 0 of hypothetical ranks."""
    num_ranks, policy = arguments.num_ranks, arguments.mixed_precision
    strategy = strategy_from(kwargs["sharding_strategy"])
    num_shards = num_ranks // arguments.num_replicas if strategy.shards else 1
    if arguments.has_rows:
        # Its meshes have these two strategies; a mesh of (num_ranks, 1) shards nothing.
        is_hybrid = strategy.is_hybrid or num_shards < num_ranks
        strategy = strategy_from(ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD)
    elif num_ranks == 1:
        strategy = strategy_from(ShardingStrategy.NO_SHARD)
    is_policy = is_a(policy, "MixedPrecisionPolicy") and arguments.has_rows
    return UnitOptions(
        strategy=strategy,
        groups=ShardingGroups(RankGroup(None, 0, num_shards), RankGroup(None, 0, num_ranks // num_shards)),
        device=torch.device("meta"),
        use_orig_params=bool(kwargs["use_orig_params"]),
        precision=precision_of_policy(policy) if is_policy else precision_from(kwargs["mixed_precision"]),
    )


def _use_rows(handles: Iterable[ParamGroup]) -> None:
    """Give handles, which nobody will run, the layout that ``fully_shard`` gives them."""
    for handle in handles:
        named = [(param_info.fqn, param_info.shape) for param_info in handle.layout.param_infos]
        handle.layout = PerParamLayout.build(named, [0] * len(named), world_size=handle.layout.world_size)


def _planned_handle(
    handle: ParamGroup, options: UnitOptions, originals: dict[str, nn.Parameter], arguments: UnitArguments
) -> PlannedHandle:
    layout, spec = handle.layout, handle.spec
    reduce_dtype = handle.grads.reduce_dtype
    final = reduce_dtype if spec.keep_reduce_dtype else handle.orig_dtype
    num_shards, num_replicas = options.groups.shard.size, options.groups.replicate.size
    row = layout.shard_numel * handle.compute_dtype.itemsize
    trainable = bool(handle.shown.num_trainable)
    owns_memory = handle.buffer.owns_memory or arguments.offloads
    gathered = layout.numel * handle.compute_dtype.itemsize if owns_memory else 0
    # Rows come in another order than the buffer's: a converted shard is sent, and accelerators receive into a copy.
    staging = 0
    if arguments.has_rows and num_shards > 1:
        staging = row if handle.compute_dtype != handle.orig_dtype else 0
        staging += gathered if arguments.is_accelerator else 0
    if arguments.offloads:
        staging += layout.shard_numel * handle.orig_dtype.itemsize  # on its way to the device
    params = [originals[param_info.fqn] for param_info in layout.param_infos]
    whole_grad = layout.numel * handle.grads.dtype.itemsize
    cast_grad = layout.numel * reduce_dtype.itemsize if reduce_dtype != handle.grads.dtype else 0
    return PlannedHandle(
        shard=layout.shard_numel * handle.orig_dtype.itemsize,
        gathered=gathered,
        staging=staging,
        whole_grad=whole_grad if trainable else 0,
        cast_grad=cast_grad,
        reduced=layout.shard_numel * reduce_dtype.itemsize if num_shards > 1 else 0,
        grad=layout.shard_numel * final.itemsize if trainable else 0,
        num_shards=num_shards,
        num_replicas=num_replicas,
        gather_row=row,
        reduce_row=layout.shard_numel * reduce_dtype.itemsize,
        trainable=trainable,
        params=tuple(params),
        optimizer_params={
            params[index]: tensor
            for index, tensor in _optimizer_params(handle, arguments).items()
            if params[index].requires_grad
        },
    )


def _optimizer_params(handle: ParamGroup, arguments: UnitArguments) -> dict[int, torch.Tensor]:
    """Return what an optimizer of rank 0 holds, by the index of the first parameter in it."""
    layout = handle.layout
    if not arguments.has_rows:
        return {each.indices.start: each.param.detach() for each in handle.shown.visible}
    shapes = [layout.local_shape(index, 0) for index in range(len(layout.param_infos))]
    return {i: torch.empty(shape, dtype=handle.orig_dtype, device="meta") for i, shape in enumerate(shapes)}
