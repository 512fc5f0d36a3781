"""SHARDED state dicts: torch's types with dim-0 chunks, made by one exchange of pieces a handle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fsdp_flat.api import StateDictConfig
from fsdp_flat.errors import LoadError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import FSDP_PREFIX, chunk_shape
from fsdp_flat.runtime import Unit, check_idle
from fsdp_flat.state_dict.boxed import BoxedTensor, boxed_values, boxes_to_shard
from fsdp_flat.state_dict.chunks import chunks_to_shard, shard_to_chunks
from fsdp_flat.state_dict.common import (
    LoadReport,
    copy_whole,
    finish_load,
    prepare_load,
    put,
    refuse_split,
    restore_buffers,
)
from fsdp_flat.state_dict.torch_types import chunked, local_chunk, shape_of

__all__ = ["load_sharded", "save_sharded"]


def save_sharded(
    unit: Unit, config: StateDictConfig, prefix: str, inner: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Add the entries of one unit's subtree: ShardedTensors, or DTensors where the unit was given a mesh.

    Every rank of the shard group must call this. What is not sharded is returned whole. With ``config.boxes`` nothing
    is exchanged: the entries are boxes of the live shard, or of a copy on the CPU with ``offload_to_cpu``.
    """
    check_idle(unit, "state_dict")
    refuse_split(unit, "SHARDED_STATE_DICT")
    groups = unit.options.groups
    with unit.names_shown():
        destination = inner()
    for handle in unit.handles:
        if getattr(config, "boxes", False):
            shard = handle.flat_param.data
            shard = shard.to("cpu", copy=True) if config.offload_to_cpu else shard
            for index, value in enumerate(boxed_values(handle.layout, groups.shard.rank, shard)):
                put(destination, handle, index, prefix, value)
            continue
        if handle.layout.world_size == 1:
            warnings.warn(
                f"Unit {unit.name!r} is not sharded, so its entries of the sharded state dict are whole tensors.",
                stacklevel=4,
            )
        chunks = shard_to_chunks(handle.layout, handle.flat_param.data, groups.shard)
        for index, chunk in enumerate(chunks):
            value = chunk.cpu() if config.offload_to_cpu else chunk
            if handle.layout.world_size > 1:
                value = chunked(value, handle.layout.slots[index].shape, groups.shard, groups.mesh)
            put(destination, handle, index, prefix, value)
    restore_buffers(unit, destination, prefix)
    return destination


def load_sharded(unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Copy one unit's pieces out of chunked tensors. Plain whole tensors are taken as well.

    Every rank of the shard group must call this, with the same names.
    """
    check_idle(unit, "load_state_dict")
    refuse_split(unit, "SHARDED_STATE_DICT")
    given = prepare_load(unit, state_dict, prefix, report)
    for handle in unit.handles:
        values = given[handle]
        chunks: list[torch.Tensor | None] = [None] * len(values)
        for index, value in enumerate(values):
            if value is None:
                continue
            if isinstance(value, BoxedTensor):
                _load_boxes(unit, handle, index, value, prefix, report)
                continue
            chunk = _checked_chunk(unit, handle, index, value, prefix, report)
            if chunk is not None:
                chunks[index] = chunk
            elif type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter):
                copy_whole(unit, handle, index, value, prefix, report)
        with torch.no_grad():
            chunks_to_shard(handle.layout, chunks, handle.flat_param.data, unit.options.groups.shard)
    finish_load(unit, state_dict, prefix + FSDP_PREFIX)


def _load_boxes(
    unit: Unit, handle: FlatParamHandle, index: int, value: BoxedTensor, prefix: str, report: LoadReport
) -> None:
    try:
        boxes_to_shard(value, handle.layout, index, unit.options.groups.shard.rank, handle.flat_param.data)
    except LoadError as error:
        report.errors.append(f"{prefix}{error}")


def _checked_chunk(
    unit: Unit, handle: FlatParamHandle, index: int, value: Any, prefix: str, report: LoadReport
) -> torch.Tensor | None:
    slot, shard = handle.layout.slots[index], unit.options.groups.shard
    chunk = local_chunk(value)
    if chunk is None:
        return None
    if shape_of(value) != slot.shape:
        report.mismatch(prefix + slot.fqn, shape_of(value), slot.shape)
        return None
    expected = chunk_shape(slot.shape, shard.size, shard.rank)
    if chunk.numel() != torch.Size(expected).numel():
        report.errors.append(
            f"{prefix + slot.fqn}: rank {shard.rank} of the shard group holds a chunk of shape {tuple(chunk.shape)}; "
            f"expected {expected} at {shard.size} ranks. Load checkpoints of another number of ranks through "
            "torch.distributed.checkpoint, which reshards."
        )
        return None
    return chunk
