"""FULL state dicts: whole tensors under the names of the unwrapped model.

A save sends every piece of one unit at a time straight to its place in the results, so the peak is the result; a load
copies this rank's pieces out of the given tensors and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_flat.api import StateDictConfig
from fsdp_flat.comm import Transfers
from fsdp_flat.layout import FSDP_PREFIX
from fsdp_flat.runtime import Unit, check_idle, whole_params
from fsdp_flat.state_dict.chunks import whole_moves
from fsdp_flat.state_dict.common import LoadReport, copy_whole, finish_load, own_pieces, prepare_load, restore_buffers

__all__ = ["load_full", "save_full"]


def save_full(unit: Unit, config: StateDictConfig, prefix: str, inner: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Add the entries of one unit's subtree to a state dict.

    Every rank of the shard group must call this.

    Args:
        unit: the unit.
        config: ``rank0_only`` leaves the unit's entries out on other ranks of its shard group.
        prefix: what the names start with.
        inner: runs the wrapped module's own ``state_dict`` into the destination and returns it. Nested units
            save themselves in it; hooks of the wrapped modules see whole parameters.
    """
    to_zero = bool(getattr(config, "rank0_only", False))
    keep = not to_zero or unit.options.groups.primary.rank == 0
    with _whole_shown(unit, keep=keep, to_zero=to_zero) as fresh:
        destination = inner()
        for handle in unit.handles:
            for index, entry in enumerate(handle.views.params):
                present = [prefix + site.fqn for site in entry.sites if prefix + site.fqn in destination]
                if not keep:
                    for name in present:
                        del destination[name]
                elif present:
                    value = destination[present[0]].detach()
                    stored = entry.guise.whole(value)
                    # Inside summon_full_params a value is a view of what is summoned, unless hooks have changed it.
                    if not fresh and _shares_memory(stored, handle.views.shown(index)):
                        stored = stored.clone()
                    stored = stored.cpu() if config.offload_to_cpu else stored
                    for name in present:
                        destination[name] = stored
        restore_buffers(unit, destination, prefix)
    return destination


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@contextmanager
def _whole_shown(unit: Unit, *, keep: bool, to_zero: bool) -> Iterator[bool]:
    """Show whole parameters where the unit's entries are kept; whether they are memory of their own."""
    if unit.whole is not None:
        with whole_params(unit):
            yield False
        return
    was_unsharded = not unit.is_sharded
    wholes = whole_tensors(unit, to_zero=to_zero)
    try:
        for handle, tensors in zip(unit.handles, wholes, strict=True):
            if keep:
                handle.views.show_tensors(tensors)
            else:
                handle.views.show_names()
        yield True
    finally:
        for handle in unit.handles:
            handle.views.hide_whole()
        if was_unsharded:
            unit.show_full()


def whole_tensors(unit: Unit, *, to_zero: bool) -> list[list[torch.Tensor]]:
    """By handle and slot, whole parameters in memory of their own; with ``to_zero`` empty but on rank 0.

    Every rank of the shard group must call this.
    """
    axis, device = unit.options.groups.shard, unit.options.device
    dst = 0 if to_zero else None
    lane = Transfers(axis, device)
    wholes: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for handle in unit.handles:
            wholes.append([])
            for index, (slot, piece) in enumerate(zip(handle.layout.slots, own_pieces(unit, handle), strict=True)):
                shape = slot.shape if dst in (None, axis.rank) else (0,)
                target = torch.empty(shape, dtype=piece.dtype, device=device)
                lane.add(whole_moves(handle, index, axis.rank, dst), piece, target.view(-1))
                wholes[-1].append(target)
        lane.wait()
    return wholes


def load_full(unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Have one unit's pieces copied out of whole tensors; no communication."""
    check_idle(unit, "load_state_dict")
    for handle, values in prepare_load(unit, state_dict, prefix, report).items():
        for index, value in enumerate(values):
            if value is not None:
                copy_whole(unit, handle, index, value, prefix, report)
    finish_load(unit, state_dict, prefix + FSDP_PREFIX)
