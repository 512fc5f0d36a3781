"""FULL state dicts: whole tensors under the names of the unwrapped model.

A save gathers one unit at a time and clones its parameters; a load copies this rank's pieces out of the given
tensors and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_flat.api import StateDictConfig
from fsdp_flat.flat import FlatParamHandle, Guise
from fsdp_flat.layout import FSDP_PREFIX
from fsdp_flat.runtime import Unit, check_idle, whole_params
from fsdp_flat.state_dict.common import LoadReport, copy_whole, finish_load, prepare_load, restore_buffers

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
    keep = not getattr(config, "rank0_only", False) or unit.options.groups.primary.rank == 0
    with whole_params(unit):
        destination = inner()
        for handle in unit.handles:
            for names, value, guise in _named_values(handle, prefix):
                present = [name for name in names if name in destination]
                if not keep:
                    for name in present:
                        del destination[name]
                elif present:
                    stored = guise.whole(destination[present[0]].detach())
                    # Only what the caller's own hooks left alone is still a view of the gathered unit.
                    if stored.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                        stored = stored.clone()
                    stored = stored.cpu() if config.offload_to_cpu else stored
                    for name in present:
                        destination[name] = stored
        restore_buffers(unit, destination, prefix)
    return destination


def _named_values(handle: FlatParamHandle, prefix: str) -> list[tuple[list[str], torch.Tensor, Guise]]:
    return [
        ([prefix + site.fqn for site in entry.sites], handle.views.shown(index), entry.guise)
        for index, entry in enumerate(handle.views.params)
    ]


def load_full(unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Copy one unit's pieces out of whole tensors; no communication."""
    check_idle(unit, "load_state_dict")
    for handle, values in prepare_load(unit, state_dict, prefix, report).items():
        for index, value in enumerate(values):
            if value is not None:
                copy_whole(unit, handle, index, value, prefix, report)
    finish_load(unit, state_dict, prefix + FSDP_PREFIX)
