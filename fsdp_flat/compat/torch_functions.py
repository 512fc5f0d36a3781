"""Replaces functions of torch that would be wrong on one rank's shards by ones that are right on all ranks.

These are all of them:

* ``torch.nn.utils.clip_grad_norm_``: the norm is that of all ranks.
* ``torch.amp.GradScaler``: an inf or NaN on one rank skips the step on every rank.
* The constructor of ``torch.nn.parallel.DistributedDataParallel``: parameters that a unit has sharded raise, and DDP
  averages gradients of a unit that shards nothing.

They call torch's own for everything that no unit shards. They are replaced, in every module that has imported them,
when the first unit is built, and :func:`restore_torch_functions` undoes it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from fsdp_flat.comm import ALONE, RankGroup, begin_all_reduce, connected
from fsdp_flat.compat.installation import namespaces
from fsdp_flat.errors import UsageError
from fsdp_flat.extras.clipping import clip_grads
from fsdp_flat.flat import is_managed
from fsdp_flat.runtime import Schedule, Unit, outermost_of, units_holding

_torch_clip_grad_norm_: Callable[..., torch.Tensor] = clip_grad.clip_grad_norm_
# GradScaler decides by what this method returns, for each device; there is no public way to change its decision.
_UNSCALE = "_unscale_grads_"
_torch_unscale_grads_: Callable[..., dict[torch.device, torch.Tensor]] = getattr(GradScaler, _UNSCALE)
_torch_ddp_init: Callable[..., None] = DistributedDataParallel.__init__


class _State:
    """Holds whether functions are replaced: None until a unit is built, or a caller has decided."""

    replaced: bool | None = None


def replace_at_first_unit() -> None:
    """Replace the functions of torch, unless that was done or undone before."""
    if _State.replaced is None:
        replace_torch_functions()


def replace_torch_functions() -> None:
    """Replace torch's functions again after :func:`restore_torch_functions`. The first unit does it by itself."""
    if not _State.replaced:
        _rebind(_torch_clip_grad_norm_, clip_grad_norm_)
        setattr(GradScaler, _UNSCALE, _unscale_grads_)
        DistributedDataParallel.__init__ = _ddp_init  # type: ignore[method-assign]
        _State.replaced = True


def restore_torch_functions() -> None:
    """Restore torch's own functions, which work on this rank's shards alone.

    They stay restored until :func:`replace_torch_functions` is called.
    """
    if _State.replaced:
        _rebind(clip_grad_norm_, _torch_clip_grad_norm_)
        setattr(GradScaler, _UNSCALE, _torch_unscale_grads_)
        DistributedDataParallel.__init__ = _torch_ddp_init  # type: ignore[method-assign]
    _State.replaced = False


def _rebind(old: object, new: object) -> None:
    """Bind every name of ``old`` in an imported module to ``new``, other than this module's own."""
    for namespace in namespaces():
        if namespace is not globals():
            for name, value in list(namespace.items()):
                if value is old:
                    namespace[name] = new


def _trees_of(units: Iterable[Unit]) -> list[Unit]:
    """Return all units of the trees that ``units`` are in, in the same order on every rank."""
    roots = {root for unit in units if (root := outermost_of(unit)) is not None}
    alone = [unit for unit in units if outermost_of(unit) is None]
    found = [each for root in sorted(roots, key=lambda root: root.unit_id) for each in _schedule_of(root).units]
    return list(dict.fromkeys([*found, *sorted(alone, key=lambda unit: unit.unit_id)]))


def _schedule_of(root: Unit) -> Schedule:
    assert isinstance(root.context, Schedule)
    return root.context


# -- clipping ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@functools.wraps(_torch_clip_grad_norm_)
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients as ``torch.nn.utils.clip_grad_norm_``, by their norm over all ranks where units shard them.

    Every rank must call this, with the same parameters.

    Args:
        parameters: one or several, of any number of models; all that no unit shards count as the same on every rank.
        max_norm: bound of the norm.
        norm_type: order of the norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: raise a RuntimeError if the norm is inf or NaN.
        foreach: passed on to torch's function; no unit's gradients need it.

    Returns:
        The norm before scaling, a scalar, the same on every rank: a DTensor for parameters of ``fully_shard`` that have
        one mesh and dtype, as torch's function returns, else a plain tensor.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    units = units_holding(given)
    if not units or _suits_torch(given, units):
        # torch warns of an empty generator.
        return _torch_clip_grad_norm_(given or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    trees = _trees_of(units)
    for schedule in {unit.context for unit in trees if isinstance(unit.context, Schedule)}:
        schedule.check_gradients_set("torch.nn.utils.clip_grad_norm_")
    unmanaged = [param for param in given if not is_managed(param)]
    return clip_grads(trees, unmanaged, max_norm, norm_type, among=set(given), error_if_nonfinite=error_if_nonfinite)


def _suits_torch(params: list[torch.Tensor], units: list[Unit]) -> bool:
    """Return whether torch's own function takes the gradients: nothing is sharded, or all are DTensors of one kind."""
    kinds = {(param.device_mesh, param.dtype) if isinstance(param, DTensor) else None for param in params}
    if None not in kinds:
        return len(kinds) == 1
    return kinds == {None} and all(len(_groups_of(unit)) == 0 for unit in units)


def _groups_of(unit: Unit) -> list[RankGroup]:
    """Return the groups of several ranks over which a unit's parameters are sharded."""
    tensor_parallel = [
        RankGroup.of(group)
        for handle in unit.handles
        for entry in handle.views.params
        for group in entry.adapter.groups
    ]
    return [group for group in (unit.options.groups.shard, *tensor_parallel) if group.size > 1]


# -- scaling -----------------------------------------------------------------------------------------------------------


@functools.wraps(_torch_unscale_grads_)
def _unscale_grads_(
    self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *args: Any
) -> dict[torch.device, torch.Tensor]:
    """Unscale the gradients of an optimizer; return for each device whether any rank has found an inf or NaN."""
    found = _torch_unscale_grads_(self, optimizer, inv_scale, found_inf, *args)
    units = _trees_of(units_holding(param for group in optimizer.param_groups for param in group["params"]))
    groups = dict.fromkeys(
        group for unit in units for group in (*_groups_of(unit), unit.options.groups.replicate) if group != ALONE
    )
    if not connected(groups):
        return found
    # A rank without gradients has a part in the decision too.
    total = functools.reduce(torch.maximum, [flag.to(found_inf.device) for flag in found.values()], found_inf)
    device = units[0].options.device
    total = total.to(device, copy=True)
    for group in connected(groups):
        total = begin_all_reduce(total, group, largest=True).wait()
    return {each: total.to(each) for each in found or {found_inf.device: found_inf}}


# -- DDP ---------------------------------------------------------------------------------------------------------------


@functools.wraps(_torch_ddp_init)
def _ddp_init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Refuse parameters that units have sharded, whose shards DDP would overwrite by rank 0's or leave unreduced."""
    given = inspect.signature(_torch_ddp_init).bind(self, module, *args, **kwargs)
    given.apply_defaults()
    unreduced = _check_ddp(module, given.arguments) if isinstance(module, nn.Module) else []
    _torch_ddp_init(self, module, *args, **kwargs)
    for param in unreduced:
        param.register_post_accumulate_grad_hook(_AccumulatedByAutograd())


def _check_ddp(module: nn.Module, given: Mapping[str, Any]) -> list[nn.Parameter]:
    """Raise if DDP with the ``given`` arguments cannot be right; return parameters of units that DDP has to average."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = {param: name for name, param in module.named_parameters() if name not in ignored}
    units, unreduced = units_holding(names), []
    if not units:
        return []
    mesh, finds_unused = given["device_mesh"], given["find_unused_parameters"]
    group = given["process_group"] or (dist.group.WORLD if mesh is None else mesh.get_group(0))
    ranks = set(dist.get_process_group_ranks(group))
    for unit in units:
        groups = unit.options.groups
        own = [set(dist.get_process_group_ranks(each.group)) for each in groups.rank_groups if each.group is not None]
        reduces = groups.num_ranks == dist.get_world_size() or len(ranks) == 1 or ranks <= set().union(*own)
        sharded = [each for each in _groups_of(unit) if each.group is not None]
        mixes = any(len(ranks.intersection(dist.get_process_group_ranks(each.group))) > 1 for each in sharded)
        held = [param for handle in unit.handles for param in handle.views.visible_params() if param in names]
        trained = [param for param in held if param.requires_grad]
        if sharded and ((given["init_sync"] and mixes) or (trained and not reduces)):
            raise UsageError(
                f"DistributedDataParallel over ranks {sorted(ranks)} was given {names[held[0]]!r}, which unit "
                f"{unit.name!r} shards: every rank holds another part of it, and DDP takes these for copies. Leave DDP "
                "out: FSDP averages gradients over all its ranks. To shard within some ranks and replicate over "
                "others, use ShardingStrategy.HYBRID_SHARD or a 2-D mesh; for a part that is only replicated, put DDP "
                "around that part before FSDP is, or use NO_SHARD."
            )
        if sharded or (reduces and finds_unused):
            continue
        if finds_unused and trained:
            raise UsageError(
                f"DistributedDataParallel with find_unused_parameters=True over ranks {sorted(ranks)} cannot find "
                f"{names[held[0]]!r} of unit {unit.name!r} in the graph, and would not average its gradient. Pass "
                "find_unused_parameters=False, or give the unit these ranks as its process_group and leave DDP out."
            )
        unreduced += trained
    return unreduced


class _AccumulatedByAutograd:
    """Accumulates a gradient that a unit has set once more, by autograd, as DDP's hooks run there alone."""

    def __init__(self) -> None:
        self._runs = False

    def __call__(self, param: torch.Tensor) -> None:
        if not self._runs:
            grad, param.grad = param.grad, None
            self._runs = True
            try:
                with torch.enable_grad():
                    param.view_as(param).backward(grad)
            finally:
                self._runs = False
