"""FULL state dicts: whole tensors under the names of the unwrapped model.

A save gathers one unit at a time and clones its parameters; a load copies this rank's pieces out of the given
tensors and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp_flat.api import StateDictConfig
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import FLAT_PARAM, FSDP_PREFIX
from fsdp_flat.runtime import Unit, check_idle, whole_params

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
    keep = not getattr(config, "rank0_only", False) or unit.options.groups.shard.rank == 0
    with whole_params(unit):
        destination = inner()
        for handle in unit.handles:
            for names, value in _named_values(handle, prefix):
                present = [name for name in names if name in destination]
                if not keep:
                    for name in present:
                        del destination[name]
                elif present:
                    stored = destination[present[0]].detach()
                    # Only what the caller's own hooks left alone is still a view of the gathered unit.
                    if stored.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                        stored = stored.clone()
                    stored = stored.cpu() if config.offload_to_cpu else stored
                    for name in present:
                        destination[name] = stored
        for path, dtype in unit.buffers.originals().items():
            if prefix + path in destination:
                destination[prefix + path] = destination[prefix + path].to(dtype)
    return destination


def _named_values(handle: FlatParamHandle, prefix: str) -> list[tuple[list[str], torch.Tensor]]:
    return [
        ([prefix + site.fqn for site in entry.sites], handle.views.shown(index))
        for index, entry in enumerate(handle.views.params)
    ]


def load_full(
    unit: Unit,
    state_dict: dict[str, Any],
    prefix: str,
    *,
    strict: bool,
    missing: list[str],
    errors: list[str],
) -> None:
    """Copy one unit's pieces out of ``state_dict`` and rename what is left for the wrapped module.

    Args:
        unit: the unit.
        state_dict: the caller's shallow copy; changed in place so that the wrapped module finds its other entries.
        prefix: where the unit's names start.
        strict: report names that are missing.
        missing: extended with names that are missing.
        errors: extended with one line per tensor that does not fit.
    """
    check_idle(unit, "load_state_dict")
    unit.reshard()
    unit.show_shard()
    _rename(state_dict, prefix)
    inner = prefix + FSDP_PREFIX
    with torch.no_grad():
        for handle in unit.handles:
            for index, entry in enumerate(handle.views.params):
                given = [(site, state_dict.pop(inner + site.fqn, None)) for site in entry.sites]
                values = [value for _, value in given if value is not None]
                if strict:
                    missing.extend(prefix + site.fqn for site, value in given if value is None)
                if values:
                    _copy_piece(unit, handle, index, values[0], prefix, errors)
    _satisfy_wrapped_modules(unit, state_dict, inner)


def _rename(state_dict: dict[str, Any], prefix: str) -> None:
    inner = prefix + FSDP_PREFIX
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(inner):
            state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)


def _copy_piece(unit: Unit, handle: FlatParamHandle, index: int, value: Any, prefix: str, errors: list[str]) -> None:
    slot = handle.layout.slots[index]
    name = prefix + slot.fqn
    if not isinstance(value, torch.Tensor):
        errors.append(f'While copying the parameter named "{name}", expected a tensor, but got {type(value)}.')
        return
    if tuple(value.shape) != slot.shape and not (value.numel() == 1 and slot.numel == 1):
        errors.append(
            f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {torch.Size(slot.shape)}."
        )
        return
    piece = handle.layout.piece(index, unit.options.groups.shard.rank)
    if not piece.is_empty:
        source = value.detach().reshape(-1)[piece.in_param.to_slice()]
        handle.flat_param.data[piece.in_shard.to_slice()].copy_(source)


def _satisfy_wrapped_modules(unit: Unit, state_dict: dict[str, Any], inner: str) -> None:
    """Give the wrapped modules' own loading something to find: each visible parameter itself."""
    registered: Mapping[str, Any] = {
        site.fqn: site.module._parameters.get(site.name)
        for handle in unit.handles
        for entry in handle.views.params
        for site in entry.sites
    }
    for fqn, param in registered.items():
        if param is not None:
            state_dict[inner + fqn] = param
    flat = unit.module._parameters.get(FLAT_PARAM)
    if flat is not None:
        state_dict[inner + FLAT_PARAM] = flat
