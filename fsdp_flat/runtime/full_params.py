"""Shows full parameters and gradients of units between steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from fsdp_flat.comm import Pending, doing, keep, true_on_any_rank, unrecorded
from fsdp_flat.core import (
    ParamGroup,
    have_grads,
    modules_of,
    place_of,
    restore_sharded_grad,
    sharded_grad_of,
    show_full_grads,
)
from fsdp_flat.core.options import Phase
from fsdp_flat.core.step import step_of
from fsdp_flat.core.unit import Unit, units_of
from fsdp_flat.errors import PhaseError, UnsupportedError, UsageError
from fsdp_flat.runtime.unit_record import FullParams, unit_record
from fsdp_flat.user_warnings import entered, warn_user


def all_gather_full(unit: Unit, of: Callable[[ParamGroup], torch.Tensor]) -> list[torch.Tensor]:
    """All-gather a shard-shaped tensor of every group (1-D, ``shard_numel``) to a full one (``layout.numel``).

    The result is separate memory, except if nothing is sharded: then it is the given tensor.
    Every rank of the shard group must call this.
    """
    streams = unit.step.streams
    with unrecorded():
        streams.shards_written()
        with streams.all_gathers:
            pendings = list[Pending]()
            try:
                for param_group in unit.param_groups:
                    pendings.append(_begin_gather(param_group, of(param_group)))
                gathered = [pending.wait() for pending in pendings]
            except BaseException:
                for pending in pendings:
                    keep(pending)
                raise
            wholes = [
                param_group.layout.unsharded_of(each)
                for param_group, each in zip(unit.param_groups, gathered, strict=True)
            ]
    streams.wait_for_all_gathers()
    return wholes


def _begin_gather(param_group: ParamGroup, shard: torch.Tensor) -> Pending:
    collectives = param_group.comm.state_collectives
    if collectives is None:
        return Pending((), shard)
    whole = shard.new_empty(param_group.layout.numel, device=param_group.spec.device)
    whole[param_group.layout.shard(param_group.spec.rank).to_slice()].copy_(shard)
    pending: Pending = collectives.begin_all_gather(whole)
    return pending


@contextmanager
def full_params(
    unit: Unit, *, device: torch.device | None = None, show: bool = True
) -> Iterator[dict[ParamGroup, torch.Tensor]]:
    """All-gather a unit in its original dtype into separate memory; with ``show`` set views of it as Parameters.

    Every rank of the shard group must enter this. The shards stay unchanged. Nested in itself (a state dict inside
    ``summon_full_params``) it does not all-gather again, so that changes not yet written back are visible.
    """
    record = unit_record(unit)
    outer = record.full
    was_shown = outer is not None and outer.are_shown
    if outer is None:
        unit.adopt_assigned()
        wholes = all_gather_full(unit, lambda param_group: param_group.flat_shard())
        tensors = dict(
            zip(unit.param_groups, wholes if device is None else [w.to(device) for w in wholes], strict=True)
        )
    else:
        tensors = outer.tensors
    record.full = FullParams(tensors, show or was_shown)
    try:
        if show and not was_shown:
            for param_group, tensor in tensors.items():
                param_group.slots.show_full_params(param_group.layout.views(tensor))
        yield tensors
    finally:
        record.full = outer
        for param_group in () if was_shown else unit.param_groups:
            param_group.slots.hide_full_params()
            if outer is None and unit.is_unsharded:
                param_group.slots.show_unsharded()


@entered
@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Generator[None, None, None]:
    """Unshard the full parameters of every unit at and below ``module`` inside the block.

    Every rank must enter it. Do not run forward or backward inside.

    Args:
        module: a wrapper or any module that holds wrappers.
        recurse: include nested wrappers.
        writeback: keep changes; each rank keeps those to its own shard.
        rank0_only: only rank 0 of each shard group gets full parameters.
        offload_to_cpu: full parameters are on the CPU.
        with_grads: full gradients too.

    Raises:
        UnsupportedError: ``writeback`` with ``rank0_only``, ``with_grads`` with ``offload_to_cpu``.
        PhaseError: inside forward, backward or another summon of the same unit.
    """
    if with_grads and offload_to_cpu:
        raise UnsupportedError("summon_full_params(with_grads=True) does not go with offload_to_cpu=True.")
    if writeback and rank0_only:
        raise UnsupportedError(
            "summon_full_params(writeback=True, rank0_only=True) could write rank 0's changes to rank 0's own shard "
            "only. Pass writeback=False, or rank0_only=False."
        )
    if offload_to_cpu and not rank0_only:
        warn_user(
            "summon_full_params(offload_to_cpu=True, rank0_only=False) makes every rank hold a full copy on its CPU. "
            "Pass rank0_only=True unless every rank needs it."
        )
    units = []
    for child in modules_of(module) if recurse else (module,):
        for unit in units_of(child, recurse=False):
            if not unit_record(unit).is_nested:
                # This is a first use: from here on the wrapper is a root.
                step_of(child, unit)
            unit.check_idle("summon_full_params")
            units.append(unit)
    if with_grads:
        _check_reduced(units)
    for unit in units if writeback else ():
        unit.adopt_assigned()
        for param_group in unit.param_groups:
            param_group.note_update()
        if not unit.holds_graph:
            unit.reshard()
    device = torch.device("cpu") if offload_to_cpu else None
    with ExitStack() as stack:
        with doing("summon_full_params"):
            for unit in units:
                shown = not rank0_only or unit.options.groups.primary.rank == 0
                whole = stack.enter_context(full_params(unit, device=device, show=shown))
                if with_grads:
                    stack.enter_context(_full_grads(unit, show=shown, writeback=writeback))
                if writeback:
                    stack.enter_context(_written_back(unit, whole))
                stack.callback(setattr, unit, "phase", unit.phase)
                unit.phase = Phase.SUMMONED
        yield


@contextmanager
def _written_back(unit: Unit, whole: dict[ParamGroup, torch.Tensor]) -> Iterator[None]:
    versions = {param_group: tensor._version for param_group, tensor in whole.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            # Every rank checks every shape, so that all raise and none waits for the others.
            for param_group in whole:
                for index, param_info in enumerate(param_group.layout.param_infos):
                    shape = tuple(param_group.slots.full_local(index).shape)
                    if shape != param_info.shape:
                        raise UsageError(
                            f"Inside summon_full_params {param_info.fqn!r} of unit {unit.name!r} became a tensor of "
                            f"shape {shape}; expected {param_info.shape}. Nothing of this unit was written back."
                        )
            for param_group, tensor in whole.items():
                rank = param_group.spec.rank
                if tensor._version != versions[param_group]:
                    # Also if the full tensor is the shard itself, which the changes reached directly.
                    param_group.raise_weights_epoch()
                for index in [local_shard.index for local_shard in param_group.layout.local_shards(rank)]:
                    target = param_group.local(index)
                    source = param_group.layout.local_part(index, rank, param_group.slots.full_local(index).detach())
                    if place_of(source) != place_of(target):
                        target.copy_(source)


def _check_reduced(units: Sequence[Unit]) -> None:
    """Raise if ``.grad`` shows slices of unreduced local gradients: they do not make up a full gradient.

    Every rank must call this. Ranks may have used different units, so all of them raise if one has such gradients.
    """
    sharded = [unit for unit in units if unit.needs_all_gather]
    waiting = [unit for unit in sharded if any(any(param_group.grads.ready()) for param_group in unit.param_groups)]
    found = bool(waiting)
    # What this rank or another has found over one group goes to the next ones, whose ranks must raise too.
    meshes = [options.groups for unit in units if sharded for options, _ in unit.by_mesh()]
    for groups in dict.fromkeys(meshes):
        (found,) = true_on_any_rank([found], groups.rank_groups)
    if found:
        told = f"of unit {waiting[0].name!r}" if waiting else "on another rank"
        raise PhaseError(
            f"summon_full_params(with_grads=True) was called where gradients {told} are not reduced yet (this is "
            f"rank {units[0].options.groups.primary.rank} of the group): each rank has a local shard of its own "
            "gradient, of a backward inside no_sync. Call it after a backward outside of no_sync, or use "
            'no_sync(mode="sharded").'
        )


@contextmanager
def _full_grads(unit: Unit, *, show: bool, writeback: bool) -> Iterator[None]:
    """All-gather the gradients of a unit, and set them inside the block on ranks that show full parameters."""
    shards = {param_group: sharded_grad_of(param_group) for param_group in unit.param_groups}
    wholes = all_gather_full(unit, shards.__getitem__)
    flags = [have_grads(param_group) for param_group in unit.param_groups]
    if unit.options.use_orig_params:
        # A rank without elements of a parameter has no gradient of it, but another may have one.
        found = dict(zip(unit.param_groups, flags, strict=True))
        flags = []
        for options, param_groups in unit.by_mesh():
            own = [flag for param_group in param_groups for flag in found[param_group]]
            anywhere = iter(true_on_any_rank(own, [options.groups.shard]))
            flags += [[next(anywhere) for _ in found[param_group]] for param_group in param_groups]
    shown = list(zip(unit.param_groups, wholes, flags, strict=True)) if show else []
    for param_group, whole, there in shown:
        show_full_grads(param_group, whole, there)
    try:
        yield
    finally:
        for param_group, whole, _ in shown:
            shard = param_group.layout.shard_of(param_group.spec.rank, whole) if writeback else shards[param_group]
            restore_sharded_grad(param_group, shard)
