"""Implements ``fully_shard``: validates its arguments and turns modules into units with a row layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_flat.api import BackwardPrefetch, ShardingStrategy
from fsdp_flat.comm import resolve_groups, strategy_from
from fsdp_flat.composable.fsdp_module import hook_state_dicts, sharded_class
from fsdp_flat.composable.sharding_policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp_flat.errors import OptionError, OptionTypeError, UsageError
from fsdp_flat.flat import RowSharding
from fsdp_flat.runtime import Ignored, UnitOptions, build_rows, compute_device_from, precision_of_rows, unit_of

__all__ = ["fully_shard"]

_Module = TypeVar("_Module", bound="nn.Module | list[nn.Module]")


def fully_shard(
    module: _Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> _Module:
    """Shard the parameters of ``module`` that are not sharded yet, in place.

    The module's class becomes a subclass of its class and :class:`FSDPModule`. Its parameters become DTensors under
    their names. Call it on inner modules before outer ones: each call makes one unit, whose parameters are all-gathered
    together. Build the optimizer afterwards.

    Every rank of the mesh must make the same calls in the same order.

    Args:
        module: a module, or several that run one after another and form one unit.
        mesh: 1-D, to shard over; or 2-D, of which dim 0 replicates and dim 1 shards. Default: all ranks.
        reshard_after_forward: free unsharded parameters after forward; None: unless the module is the outermost.
        shard_placement_fn: returns for a parameter the ``Shard(dim)`` to use, or None for ``Shard(0)``.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: a :class:`CPUOffloadPolicy` keeps shards in host memory.
        ignored_params: parameters that are not sharded and whose gradients are not reduced.

    Returns:
        ``module``.

    Raises:
        OptionError: (a ValueError) arguments or a model that cannot be used.
        OptionTypeError: (a TypeError) an argument of the wrong type.
        UsageError: (a RuntimeError) no process group.
    """
    members = _members(module)
    mesh = _mesh_or_default(mesh)
    strategy = strategy_from(ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD)
    device, _ = compute_device_from(None if mesh.device_type != "cpu" else "cpu")
    options = UnitOptions(
        strategy=strategy,
        groups=resolve_groups(strategy, None, mesh, has_policy=False, device=device),
        device=device,
        device_given=True,
        use_orig_params=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=False,
        limit_all_gathers=True,
        sync_states="warn",
        precision=precision_of_rows(mp_policy),
        offload_params=isinstance(offload_policy, CPUOffloadPolicy),
        param_init_fn=None,
        rows=RowSharding(mesh, lambda param: _dim_of(param, shard_placement_fn)),
    )
    ignored = Ignored(frozenset(), frozenset(ignored_params or ()))
    unit = build_rows(members, options, ignored)
    unit.control.reshard_after_forward = None if reshard_after_forward is None else bool(reshard_after_forward)
    unit.control.reshard_after_backward = True
    for member in members:
        member.__dict__["_unit"] = unit
        member.__class__ = sharded_class(type(member))
    hook_state_dicts(unit)
    return module


def _members(module: Any) -> Sequence[nn.Module]:
    members = list(module) if isinstance(module, (list, tuple)) else [module]
    for member in members:
        if not isinstance(member, nn.Module):
            raise OptionTypeError(f"module must be an nn.Module or a list of them; got {type(member).__name__}.")
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            raise OptionError(
                f"fully_shard was called on a {type(member).__name__}, which has no forward. Call it on the modules "
                "inside, or on the module that runs them."
            )
        if unit_of(member) is not None:
            raise OptionError(
                f"{type(member).__name__} is sharded already, by fully_shard or FullyShardedDataParallel. Call it once "
                "per module, inner modules first."
            )
    if not members:
        raise OptionError("fully_shard was called on an empty list of modules.")
    return members


def _mesh_or_default(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise OptionTypeError(f"mesh must be a DeviceMesh; got {type(mesh).__name__}.")
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
    device, _ = compute_device_from(None)
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _dim_of(param: nn.Parameter, shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None) -> int:
    placement = None if shard_placement_fn is None else shard_placement_fn(param)
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise OptionTypeError(f"shard_placement_fn must return a Shard or None; got {placement!r}.")
    return placement.dim
