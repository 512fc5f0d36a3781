"""Implements ``fully_shard`` and its options: validates arguments and turns modules into units with a row layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_flat.guards  # noqa: F401 (turns the guards on)
from fsdp_flat.api import BackwardPrefetch, ShardingStrategy, is_a
from fsdp_flat.comm import resolve_groups, strategy_from
from fsdp_flat.composable.fsdp_module import FSDPModule, hook_state_dicts, sharded_class
from fsdp_flat.composable.fsdp_state import FSDPState, state_of
from fsdp_flat.composable.offload_policies import CPUOffloadPolicy, OffloadPolicy
from fsdp_flat.composable.torch_composable import FullyShardMark
from fsdp_flat.core import (
    IN_PLACE,
    DataParallelDims,
    Ignored,
    PerParamSharding,
    SmallerGroup,
    Unit,
    UnitOptions,
    concatenated_mesh,
    flattened_mesh,
    is_replicated,
    modules_of,
    outside_fake_mode,
    unit_of,
    units_of,
)
from fsdp_flat.errors import OptionError, OptionTypeError, ShardingError, UnsupportedError, UsageError
from fsdp_flat.guards.torch_functions import replace_at_first_unit
from fsdp_flat.runtime import (
    build_per_param,
    check_callable,
    check_not_torchs,
    check_outside_units,
    current_accelerator,
    default_device,
    devices_of,
    listed,
    precision_of_policy,
    resolve_ignored,
    unit_record,
    with_known_arguments,
)
from fsdp_flat.user_warnings import warn_user

ShardPlacementFn = Callable[[nn.Parameter], Any]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Holds the dtypes of a unit. Sharded parameters and their gradients keep the parameters' own dtype.

    Attributes:
        param_dtype: dtype of unsharded parameters, and so of compute; None keeps the original one.
        reduce_dtype: dtype in which gradients are reduced; None is ``param_dtype``.
        output_dtype: dtype to which floating-point outputs of the forward are cast; None leaves them.
        cast_forward_inputs: cast floating-point inputs of the forward to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class DataParallelMeshDims:
    """Names the data-parallel dims of a mesh over which the parameters are DTensors already.

    Attributes:
        shard: the dim to shard over, or several, which are flattened into one.
        replicate: the dim to replicate over, or several.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check that a dim is named."""
        if self.shard is None and self.replicate is None:
            raise OptionError("DataParallelMeshDims needs a dim to shard over, or one to replicate over; got neither.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | str | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | str | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


@with_known_arguments
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | str | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` that are not sharded yet, in place.

    The module's class becomes a subclass of its class and :class:`FSDPModule`. Its parameters become DTensors under
    their names. Call it on inner modules before outer ones: each call makes one unit, whose parameters are all-gathered
    together. Build the optimizer afterwards.

    Every rank of the mesh must make the same calls in the same order.

    Args:
        module: a module, or several that run one after another and form one unit.
        mesh: 1-D, to shard over; or 2-D, of which dim 0 replicates and dim 1 shards. The parameters
            move to its device type. Default: all ranks, and the device of the parameters, or the current accelerator
            if the default group moves no CPU tensors, as NCCL's.
        reshard_after_forward: free unsharded parameters after forward; None: unless the module is the outermost. A
            number of ranks, a factor of those that shard: groups of that many consecutive ranks hold all parameters
            between forward and backward, which all-gathers in the group; 1 is False, and all ranks is True. A size like
            "40GB": None with a memory budget, one for the tree. Besides the outermost module's, the parameters of the
            last modules of the forward, which backward needs first, stay until then, as far as this many bytes a rank
            go; modules with None are among them.
        shard_placement_fn: returns for a parameter the ``Shard(dim)`` to use, or None for ``Shard(0)``; or torch's
            ``ShardPlacementResult`` of that and a mesh of its own, for experts that are sharded over fewer ranks than
            the rest. The parameters of each mesh are all-gathered together, and their gradients are averaged over it.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: a :class:`CPUOffloadPolicy` keeps shards in host memory.
        ignored_params: parameters that are not sharded and whose gradients are not reduced.
        dp_mesh_dims: a :class:`DataParallelMeshDims` with the data-parallel dims of ``mesh``, which may have others
            too. Every parameter must be a DTensor over ``mesh``, replicated over these dims; it stays one over that
            mesh, sharded over the dim to shard over. With none to shard over, gradients are averaged.

    Returns:
        ``module``.

    Raises:
        OptionError: (a ValueError) arguments or a model that cannot be used; as torch's errors are, also an
            AssertionError for a module that is sharded already and for a dim that is not there (ShardingError), and a
            NotImplementedError for an uneven dim other than 0 (UnevenDimError).
        OptionTypeError: (a TypeError) an argument of the wrong type.
        UsageError: (a RuntimeError) no process group.
    """
    members = _members(module)
    if shard_placement_fn is not None:
        check_callable("shard_placement_fn", shard_placement_fn)
    data_dims = None if dp_mesh_dims is None else _data_dims(mesh, dp_mesh_dims)
    # A program may pass the class itself for its defaults, which its attributes are.
    mp_policy, offload_policy = _instance(mp_policy, "MixedPrecisionPolicy"), _instance(offload_policy, "OffloadPolicy")
    if offload_policy is not None and not is_a(offload_policy, "OffloadPolicy"):
        raise OptionTypeError(
            f"offload_policy must be an OffloadPolicy; got {offload_policy!r}. For example "
            "offload_policy=CPUOffloadPolicy()."
        )
    offloads = is_a(offload_policy, "CPUOffloadPolicy")
    mesh = _mesh_or_default(mesh if data_dims is None else _data_mesh(data_dims), members, offloads=offloads)
    options = _options(mp_policy, PerParamSharding(mesh, offloads, data_dims, policy=mp_policy), reshard_after_forward)
    by_mesh = {mesh: options}

    def place(param: nn.Parameter) -> tuple[UnitOptions, int]:
        dim, info = _placement(param, shard_placement_fn)
        other = mesh if info is None else info.mesh
        if other not in by_mesh:
            rows = replace(_rows_over(info, mesh, offloads=offloads), policy=mp_policy)
            by_mesh[other] = _options(mp_policy, rows, reshard_after_forward)
        return by_mesh[other], dim

    ignored = _ignored(members, ignored_params)
    for member in members:
        check_not_torchs(member, ignored)
    unit = build_per_param(members, options, ignored, place)
    is_one = reshard_after_forward == 1 and not isinstance(reshard_after_forward, bool)
    if is_one and any(options.strategy.shards for options, _ in unit.by_mesh()):
        warn_user(
            "reshard_after_forward=1 leaves the parameters unsharded on every rank, as False does. Pass True to free "
            "them."
        )
    _set_resharding(unit, reshard_after_forward)
    hook_state_dicts(unit)
    replace_at_first_unit()
    undo = unit_record(unit).undo
    for member in members:
        member.__dict__["_unit"] = unit
        mark = FullyShardMark(member, sharded_class(type(member)), FSDPState(member, unit))
        # torch's modules have native paths for modules without hooks, which read the weights outside of any forward.
        undo += [member.register_forward_pre_hook(_unshards), mark]
    return module


def shard_for_wrapper(module: nn.Module, options: UnitOptions, ignored: Ignored) -> None:
    """Shard a module in place as a wrapper of these options would: all its parameters are of other classes of tensors.

    Such parameters cannot be parts of a flat one. The wrapper around the module has none then.
    """
    groups, precision = options.groups, options.precision
    if groups.num_ranks > 1 and not options.strategy.shards:
        raise UnsupportedError(
            f"All parameters of this {type(module).__name__} are of other classes than torch.Tensor, which need a "
            f"strategy that shards; got {options.strategy.member.name}. Pass them as ignored_states instead: every "
            "rank keeps its copy."
        )
    mesh = groups.mesh
    if mesh is None and groups.replicate.size > 1 and options.strategy.shards:
        raise OptionError(
            f"All parameters of this {type(module).__name__} are of other classes than torch.Tensor, which become "
            f"DTensors on a mesh. Pass {options.strategy.member.name} a device_mesh of two dims, in the place of "
            "process groups."
        )
    if mesh is None:
        assert groups.process_group is not None
        with outside_fake_mode():
            mesh = DeviceMesh.from_group(groups.process_group, options.device.type)
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=options.strategy.budget or options.strategy.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy() if options.offload_params else None,
        ignored_params=set(ignored.params),
    )


# torch's pipelining calls fully_shard.state(module).
fully_shard.state = state_of  # type: ignore[attr-defined]


def _unshards(_module: nn.Module, _args: Any) -> None:
    """Mark a module whose weights exist inside its forward only; does nothing."""


def _instance(policy: Any, class_name: str) -> Any:
    """Return an instance of ``policy`` if it is the class of this name, ours or torch's; else ``policy``."""
    return policy() if isinstance(policy, type) and policy.__name__ == class_name else policy


def _members(module: Any) -> Sequence[nn.Module]:
    given = list(dict.fromkeys(module)) if isinstance(module, (list, tuple)) else [module]
    for member in given:
        if not isinstance(member, nn.Module):
            raise OptionTypeError(f"module must be an nn.Module or a list of them; got {type(member).__name__}.")
    # Of a module and others inside it the outer one is the unit's, as in torch.
    below = {child for member in given for child in modules_of(member) if child is not member}
    members = [member for member in given if member not in below]
    for member in members:
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)) and type(member).forward is nn.Module.forward:
            raise OptionError(
                f"fully_shard was called on a {type(member).__name__}, which has no forward. Call it on the modules "
                "inside, or on the module that runs them."
            )
        if unit_of(member) is not None:
            raise ShardingError(
                f"{type(member).__name__} is sharded already, by fully_shard or FullyShardedDataParallel. Call it once "
                "per module, inner modules first."
            )
        check_outside_units(member)
    if not members:
        raise OptionError("fully_shard was called on an empty list of modules.")
    return members


def _ignored(members: Sequence[nn.Module], ignored_params: set[nn.Parameter] | None) -> Ignored:
    """Return what the unit leaves alone: ``ignored_params``, what nested units ignore, and what is replicated."""
    modules: set[nn.Module] = set()
    given = () if ignored_params is None else ignored_params
    params = set(listed("ignored_params", given, lambda param: isinstance(param, nn.Parameter), "parameters"))
    for member in members:
        replicated = [child for child in modules_of(member) if is_replicated(child)]
        found = resolve_ignored(member, replicated, None, units_of(member))
        modules |= found.modules
        params |= found.params
    return Ignored(frozenset(modules), frozenset(params))


def _mesh_or_default(mesh: DeviceMesh | None, members: Sequence[nn.Module], *, offloads: bool) -> DeviceMesh:
    """Return the mesh of the call, by default one of all ranks, of the device on which the modules compute."""
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise OptionTypeError(
                f"mesh must be a DeviceMesh; got {mesh!r}. For example "
                'mesh=torch.distributed.device_mesh.init_device_mesh("cuda", (num_ranks,)).'
            )
        if mesh.ndim not in (1, 2):
            raise OptionError(
                f"mesh must have one dim (shard) or two (replicate, shard); got {mesh.ndim}. Pass a slice of it, "
                'mesh["dp_shard"] or mesh["dp_replicate", "dp_shard"].'
            )
        return mesh
    if not dist.is_initialized():
        raise UsageError(
            "fully_shard needs a process group: call torch.distributed.init_process_group(...) first, and start the "
            "script with torchrun."
        )
    nested = [unit.options.device for member in members for unit in units_of(member)]
    devices = nested or devices_of(child for member in members for child in modules_of(member))
    device, _ = default_device(devices, [dist.group.WORLD], offloads=offloads and not nested)
    with outside_fake_mode():
        return init_device_mesh(device.type, (dist.get_world_size(),))


def _data_dims(mesh: Any, given: Any) -> DataParallelDims:
    """Return the data-parallel dims of ``mesh`` that ``given``, of our class or torch's, names."""
    if not is_a(given, "DataParallelMeshDims"):
        raise OptionTypeError(f"dp_mesh_dims must be a DataParallelMeshDims; got {type(given).__name__}.")
    shard, replicate = given.shard_names, given.replicate_names
    known = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    missing = [name for name in (*shard, *replicate) if name not in (known or ())]
    if missing:
        raise OptionError(
            f"dp_mesh_dims names {missing}, but the dims of mesh are {known}. Pass the mesh of the parameters, made "
            "with mesh_dim_names, and names of its dims."
        )
    return DataParallelDims(mesh, shard, replicate)


def _data_mesh(dims: DataParallelDims) -> DeviceMesh:
    with outside_fake_mode():
        if not dims.shard:
            return flattened_mesh(dims.mesh[dims.replicate])
        shard = flattened_mesh(dims.mesh[dims.shard])
        return concatenated_mesh(flattened_mesh(dims.mesh[dims.replicate]), shard) if dims.replicate else shard


def _options(mp_policy: Any, rows: PerParamSharding, reshard_after_forward: bool | int | str | None) -> UnitOptions:
    mesh, data_dims = rows.mesh, rows.data_dims
    kind = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    strategy = strategy_from(ShardingStrategy.NO_SHARD if data_dims is not None and not data_dims.shard else kind)
    value = reshard_after_forward
    if isinstance(value, str) and strategy.shards:
        strategy = strategy.with_budget(value, "reshard_after_forward")
    accelerator = current_accelerator()
    follows_mesh = accelerator is not None and (mesh.device_type != "cpu" or accelerator.type == "cpu")
    device = accelerator if accelerator is not None and follows_mesh else torch.device("cpu")
    options = UnitOptions(
        strategy=strategy,
        groups=resolve_groups(strategy, None, mesh, has_policy=False, device=device),
        device=device,
        device_given=True,
        use_orig_params=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        precision=precision_of_policy(mp_policy),
        offload_params=rows.offloads,
        api=IN_PLACE,
        per_param=rows,
    )
    num_shards = options.groups.shard.size
    divides = isinstance(value, int) and value > 0 and num_shards % value == 0
    if strategy.shards and not (divides or isinstance(value, (bool, str, NoneType))):
        possible = ", ".join(str(size) for size in range(1, num_shards + 1) if num_shards % size == 0)
        raise OptionError(
            'reshard_after_forward must be True, False, None, a size like "40GB" or a number of ranks that divides '
            f"the {num_shards} that shard ({possible}); got {value!r}."
        )
    return options


def _set_resharding(unit: Unit, value: bool | int | str | None) -> None:
    """Have a unit reshard after forward: whether, or to how many ranks."""
    control = unit.control
    control.reshard_after_backward = True
    # Where nothing is sharded, nothing is resharded, as in torch.
    if value is None or isinstance(value, str) or not any(options.strategy.shards for options, _ in unit.by_mesh()):
        control.reshard_after_forward = None
        return
    control.reshard_after_forward = value if isinstance(value, bool) else value > 1
    for options, param_groups in unit.by_mesh():
        shard = options.groups.shard
        if not isinstance(value, bool) and 1 < value < shard.size:
            smaller_group = SmallerGroup(shard, value)
            for param_group in param_groups:
                param_group.comm.use_smaller_group(smaller_group)


def _placement(param: nn.Parameter, shard_placement_fn: ShardPlacementFn | None) -> tuple[int, Any]:
    """Return the dim to shard, and torch's description of a mesh to shard over, or None for that of the call."""
    given: Any = None if shard_placement_fn is None else shard_placement_fn(param)
    # torch's ShardPlacementResult, which is not public.
    info = getattr(given, "mesh_info", None)
    given = given if info is None else given.placement
    if given is not None and not isinstance(given, Shard):
        raise OptionError(f"shard_placement_fn must return a Shard or None; got {given!r}.")
    return 0 if given is None else given.dim, info


def _rows_over(info: Any, mesh: DeviceMesh, *, offloads: bool) -> PerParamSharding:
    """Return how parameters are sharded over the mesh of ``info``, in place of ``mesh``, that of the call.

    ``info`` is torch's ``FSDPMeshInfo`` or ``HSDPMeshInfo``, which are not public; all but its mesh may be missing.
    """
    other, ndim = info.mesh, getattr(info.mesh, "ndim", 0)
    roles = getattr(info, "replicate_mesh_dim", ndim - 2), getattr(info, "shard_mesh_dim", ndim - 1)
    if not isinstance(other, DeviceMesh) or (ndim, *roles) not in ((1, None, 0), (1, -1, 0), (2, 0, 1)):
        raise OptionError(
            f"shard_placement_fn must choose an FSDPMeshInfo(mesh, shard_mesh_dim=0) with a mesh of one dim, or an "
            f"HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0) with two; got {info!r}."
        )
    if other.device_type != mesh.device_type or other.get_coordinate() is None:
        raise OptionError(
            f"shard_placement_fn chose {other} on rank {dist.get_rank()}, which must be one of its ranks, and whose "
            f"parameters are on {mesh.device_type!r}, by the mesh of the call."
        )
    dims = getattr(info, "dp_mesh_dims", None)
    names = ", ".join(other.mesh_dim_names or ()) or "mesh of " + " x ".join(map(str, other.shape))
    return PerParamSharding(other, offloads, None if dims is None else _data_dims(info.spmd_mesh, dims), f" ({names})")
