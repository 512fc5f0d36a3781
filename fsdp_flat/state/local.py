"""Saves and loads LOCAL state dicts: each unit's flat shard, for the same wrapping and number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fsdp_flat.api import StateDictConfig
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import FLAT_PARAM, FSDP_PREFIX
from fsdp_flat.runtime import Unit, check_idle
from fsdp_flat.state.common import LoadReport, copy_full, finish_load, prepare_load, put, restore_buffers
from fsdp_flat.state.full import encode_full
from fsdp_flat.state.torch_types import flat_sharded, local_chunk, shape_of

__all__ = ["decode_local", "encode_local"]


def flat_key(unit: Unit, handle: FlatParamHandle) -> str:
    """Return the name of a handle's flat parameter below its unit: ``_flat_param``, ``_flat_param_1``, ..."""
    index = unit.handles.index(handle)
    return FLAT_PARAM if index == 0 else f"{FLAT_PARAM}_{index}"


def _valid_numel(handle: FlatParamHandle, rank: int) -> int:
    layout = handle.layout
    return max(0, min(layout.shard_numel, layout.unpadded_numel - rank * layout.shard_numel))


def encode_local(
    unit: Unit,
    config: StateDictConfig,
    prefix: str,
    inner: Callable[[], dict[str, Any]],
    _gathered: None = None,
) -> dict[str, Any]:
    """Add one unit's flat shards as views of live memory, or with ``offload_to_cpu`` as copies (also on the CPU)."""
    check_idle(unit, "state_dict")
    groups = unit.options.groups
    if groups.mesh is not None:
        raise UnsupportedError("LOCAL_STATE_DICT does not go with a device_mesh; use SHARDED_STATE_DICT.")
    if unit.handles and groups.shard.size == 1:
        warnings.warn(
            f"Unit {unit.name!r} is not sharded, so its entries of the local state dict are whole tensors.",
            stacklevel=4,
        )
        return encode_full(unit, config, prefix, inner)
    destination = inner()
    for handle in unit.handles:
        for index, _ in enumerate(handle.layout.param_infos):
            put(destination, handle, index, prefix, None)
        if unit.is_sharded:
            handle.adopt_changes()
        local = handle.flat_param.detach()[: _valid_numel(handle, groups.shard.rank)]
        local = local.to("cpu", copy=True) if config.offload_to_cpu else local
        value = flat_sharded(local, handle.layout.shard_numel, handle.layout.unpadded_numel, groups.shard)
        destination[prefix + flat_key(unit, handle)] = value
    restore_buffers(unit, destination, prefix)
    return destination


def _copy(handle: FlatParamHandle, local: torch.Tensor) -> None:
    handle.flat_param.data[: local.numel()].copy_(local)


def decode_local(unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Add to ``report`` the copies of one unit's flat shards."""
    check_idle(unit, "load_state_dict")
    inner = prefix + FSDP_PREFIX
    flats = {
        handle: state_dict.pop(name, state_dict.pop(inner + flat_key(unit, handle), None))
        for handle in unit.handles
        for name in [prefix + flat_key(unit, handle)]
    }
    quiet = LoadReport()
    given = prepare_load(unit, state_dict, prefix, quiet, loads_flats=True)
    # Parameter names are not expected here, so their "missing" entries are dropped; the preparatory writes are kept.
    report.writes.extend(quiet.writes)
    rank = unit.options.groups.shard.rank
    for handle, value in flats.items():
        name = prefix + flat_key(unit, handle)
        if value is None:
            if unit.options.groups.shard.size == 1 and all(entry is not None for entry in given[handle]):
                for index, entry in enumerate(given[handle]):
                    copy_full(unit, handle, index, entry, prefix, report)
            elif any(entry is not None for entry in given[handle]):
                report.errors.append(
                    f"{name}: this load is of a LOCAL_STATE_DICT, and the state dict has entries by parameter names "
                    f"for unit {unit.name!r}: it is a FULL_STATE_DICT or a SHARDED_STATE_DICT. Load it inside "
                    "FSDP.state_dict_type(model, ...) with the type that it was saved with."
                )
            else:
                report.missing.append(name)
            continue
        local = local_chunk(value)
        expected = _valid_numel(handle, rank)
        if local is None or local.numel() != expected or shape_of(value) != (handle.layout.unpadded_numel,):
            got = f"{type(value).__name__} of shape {shape_of(value)}"
            held = "nothing readable" if local is None else f"{local.numel()} elements"
            report.errors.append(
                f"{name}: a local state dict fits the wrapping and number of ranks that wrote it only. Got a {got}, "
                f"of which rank {rank} holds {held}; expected {handle.layout.unpadded_numel} and {expected}. Use "
                "SHARDED_STATE_DICT with torch.distributed.checkpoint, or FULL_STATE_DICT, to change either."
            )
            continue
        report.writes.append(partial(_copy, handle, local))
    finish_load(unit, state_dict, inner)
