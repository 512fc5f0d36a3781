"""Saves and loads FULL state dicts: full tensors under the names of the unwrapped model.

A save sends every local shard directly to its place in the results, so peak memory is the result (plus one unit if
results move from an accelerator to the CPU). A load copies this rank's local shards out of the given tensors and
communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_flat.api import StateDictConfig
from fsdp_flat.comm import P2PChannels
from fsdp_flat.layout import FSDP_PREFIX, clean_fqn
from fsdp_flat.runtime import Unit, check_idle, full_params
from fsdp_flat.state.chunk_specs import plan_full_transfer
from fsdp_flat.state.common import (
    LoadReport,
    copy_full,
    finish_load,
    local_shards_of,
    prepare_load,
    restore_buffers,
)

__all__ = ["decode_full", "encode_full", "prefetch_full"]

# Full tensors, by handle and parameter.
Wholes = list[list[torch.Tensor]]


def prefetch_full(units: Sequence[Unit], config: StateDictConfig) -> dict[Unit, Wholes]:
    """Exchange the full tensors of every unit at once; return an empty dict if device memory might not hold them.

    Every rank of the shard groups must call this.
    """
    if config.offload_to_cpu and any(unit.context.streams.is_accelerator for unit in units):
        return {}
    return full_tensors([unit for unit in units if unit.whole is None], to_zero=_to_zero(config))


def _to_zero(config: StateDictConfig) -> bool:
    return bool(getattr(config, "rank0_only", False))


def encode_full(
    unit: Unit,
    config: StateDictConfig,
    prefix: str,
    inner: Callable[[], dict[str, Any]],
    gathered: Wholes | None = None,
) -> dict[str, Any]:
    """Add the entries of one unit's subtree to a state dict.

    Every rank of the shard group must call this.

    Args:
        unit: the unit.
        config: ``rank0_only`` omits the unit's parameters and buffers on other ranks of its shard group.
        prefix: prefix of the names.
        inner: runs the wrapped module's own ``state_dict`` into the destination and returns it. Nested units
            save themselves in it; hooks of the wrapped modules see full parameters.
        gathered: the result of :func:`prefetch_full` for the unit.
    """
    to_zero = _to_zero(config)
    keep = not to_zero or unit.options.groups.primary.rank == 0
    with _full_params_registered(unit, gathered, keep=keep, to_zero=to_zero) as fresh:
        destination = inner()
        for handle in unit.handles:
            for index, entry in enumerate(handle.views.params):
                present = [prefix + site.fqn for site in entry.sites if prefix + site.fqn in destination]
                if not keep:
                    for name in present:
                        del destination[name]
                elif present:
                    value = destination[present[0]].detach()
                    stored = entry.adapter.full_tensor(value)
                    # Inside summon_full_params a value is a view of the summoned parameter, unless a hook replaced it.
                    if not fresh and _shares_memory(stored, handle.views.shown(index)):
                        stored = stored.clone()
                    stored = stored.cpu() if config.offload_to_cpu else stored
                    for name in present:
                        destination[name] = stored
        if keep:
            restore_buffers(unit, destination, prefix)
        else:
            for path, _ in unit.module.named_buffers(remove_duplicate=False):
                destination.pop(prefix + clean_fqn(path), None)
    return destination


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@contextmanager
def _full_params_registered(unit: Unit, gathered: Wholes | None, *, keep: bool, to_zero: bool) -> Iterator[bool]:
    """Register full parameters in the modules if ``keep``; yield whether they are freshly allocated."""
    if unit.whole is not None:
        with full_params(unit):
            yield False
        return
    was_unsharded = not unit.is_sharded
    wholes = full_tensors([unit], to_zero=to_zero)[unit] if gathered is None else gathered
    try:
        for handle, tensors in zip(unit.handles, wholes, strict=True):
            if keep:
                handle.views.use_full_tensors(tensors)
            else:
                handle.views.show_names()
        yield True
    finally:
        for handle in unit.handles:
            handle.views.unregister_full_params()
        if was_unsharded:
            unit.use_unsharded_views()


def full_tensors(units: Sequence[Unit], *, to_zero: bool) -> dict[Unit, Wholes]:
    """Unshard parameters into new tensors; with ``to_zero`` they are empty except on rank 0 of the shard groups.

    Every rank of the shard groups must call this.
    """
    dst = 0 if to_zero else None
    channels = P2PChannels()
    found: dict[Unit, Wholes] = {}
    with torch.no_grad():
        for unit in units:
            rank_group, device = unit.options.groups.shard, unit.options.device
            found[unit] = []
            for handle in unit.handles:
                wholes = []
                for index, (param_info, local_shard) in enumerate(
                    zip(handle.layout.param_infos, local_shards_of(unit, handle), strict=True)
                ):
                    shape = param_info.shape if dst in (None, rank_group.rank) else (0,)
                    target = torch.empty(shape, dtype=local_shard.dtype, device=device)
                    transfer_plan = plan_full_transfer(handle, index, rank_group.rank, dst)
                    channels.add(
                        rank_group,
                        device,
                        transfer_plan,
                        local_shard,
                        target.view(-1),
                        nbytes=param_info.numel * local_shard.itemsize,
                    )
                    wholes.append(target)
                found[unit].append(wholes)
        channels.wait()
    return found


def decode_full(unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Add to ``report`` the copies of one unit's local shards out of full tensors; no communication."""
    check_idle(unit, "load_state_dict")
    for handle, values in prepare_load(unit, state_dict, prefix, report).items():
        for index, value in enumerate(values):
            if value is not None:
                copy_full(unit, handle, index, value, prefix, report)
    finish_load(unit, state_dict, prefix + FSDP_PREFIX)
