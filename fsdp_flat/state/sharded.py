"""Saves and loads SHARDED state dicts: DTensors or ShardedTensors of dim-0 chunks, from one exchange of shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_flat.api import StateDictConfig
from fsdp_flat.errors import LoadError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import FSDP_PREFIX
from fsdp_flat.runtime import Unit, check_idle
from fsdp_flat.state.boxed import BoxedTensor, boxed_value, boxes_to_shard, check_boxes
from fsdp_flat.state.chunk_specs import ChunkSpec, ShardWithSpec, chunk_spec, chunks_of, fitting_chunk
from fsdp_flat.state.common import (
    LoadReport,
    copy_full,
    finish_load,
    local_shards_of,
    prepare_load,
    put,
    restore_buffers,
)
from fsdp_flat.state.torch_types import is_chunked, shape_of

__all__ = ["decode_sharded", "encode_sharded", "prefetch_sharded"]


def prefetch_sharded(units: Sequence[Unit], config: StateDictConfig) -> dict[Unit, list[Any]]:
    """Exchange the chunks of every unit at once; return an empty dict if device memory might not hold them.

    Not for ``boxes=True``, which communicates nothing. Every rank of the shard groups must call this.
    """
    if config.offload_to_cpu and any(unit.context.streams.is_accelerator for unit in units):
        return {}
    return _chunks(units, config)


def _chunks(units: Sequence[Unit], config: StateDictConfig) -> dict[Unit, list[Any]]:
    places, rows = [], []
    for unit in units:
        check_idle(unit, "state_dict")
        for handle in unit.handles:
            for index, local_shard in enumerate(local_shards_of(unit, handle)):
                places.append(unit)
                rows.append(ShardWithSpec(chunk_spec(unit, handle, index), local_shard))
    found: dict[Unit, list[Any]] = {unit: [] for unit in units}
    with torch.no_grad():
        for unit, value in zip(places, chunks_of(rows, offload=config.offload_to_cpu), strict=True):
            found[unit].append(value)
    return found


def _as_boxes(config: StateDictConfig) -> bool:
    return bool(getattr(config, "boxes", False))


def encode_sharded(
    unit: Unit,
    config: StateDictConfig,
    prefix: str,
    inner: Callable[[], dict[str, Any]],
    gathered: list[Any] | None = None,
) -> dict[str, Any]:
    """Add the entries of one unit's subtree: ShardedTensors, or DTensors if the unit has a mesh.

    Every rank of the shard group must call this. Unsharded units save full tensors. With ``config.boxes`` nothing is
    exchanged: the entries are boxes of the live shard, or of a copy on the CPU with ``offload_to_cpu``.

    Args:
        unit, config, prefix, inner: as for :func:`encode_full`.
        gathered: the result of :func:`prefetch_sharded` for the unit.
    """
    check_idle(unit, "state_dict")
    with _names_shown(unit):
        destination = inner()
    if _as_boxes(config):
        _put_boxes(unit, config, prefix, destination)
        return destination
    if unit.handles and unit.options.groups.shard.size == 1:
        warnings.warn(
            f"Unit {unit.name!r} is not sharded, so its entries of the sharded state dict are whole tensors.",
            stacklevel=4,
        )
    values = iter(_chunks([unit], config)[unit] if gathered is None else gathered)
    for handle in unit.handles:
        for index in range(len(handle.layout.param_infos)):
            put(destination, handle, index, prefix, next(values))
    restore_buffers(unit, destination, prefix)
    return destination


@contextmanager
def _names_shown(unit: Unit) -> Iterator[None]:
    """Register a placeholder under every original name, so that the dict gets its keys in their order."""
    try:
        for handle in unit.handles:
            handle.views.show_names()
        yield
    finally:
        for handle in unit.handles:
            handle.views.unregister_full_params()


def _put_boxes(unit: Unit, config: StateDictConfig, prefix: str, destination: dict[str, Any]) -> None:
    for handle in unit.handles:
        for index, local_shard in enumerate(local_shards_of(unit, handle)):
            own = local_shard.to("cpu", copy=True) if config.offload_to_cpu else local_shard
            put(destination, handle, index, prefix, boxed_value(handle, index, own))
    restore_buffers(unit, destination, prefix)


def decode_sharded(unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Add to ``report`` the loads of one unit's local shards from chunked tensors or full tensors.

    If any value of a load is chunked, every rank of the shard group must call this, with the same names.
    """
    check_idle(unit, "load_state_dict")
    given = prepare_load(unit, state_dict, prefix, report)
    if unit.handles:
        report.units.append(unit)
    for handle, values in given.items():
        local_shards = [
            handle.flat_param.data[local_shard.in_shard.to_slice()] for local_shard in handle.views.local_shards
        ]
        for index, value in enumerate(values):
            if value is None:
                continue
            name = prefix + handle.layout.param_infos[index].fqn
            report.has_chunks = report.has_chunks or is_chunked(value)
            report.has_own = report.has_own or not is_chunked(value)
            if isinstance(value, BoxedTensor):
                _load_boxes(handle, index, value, prefix, local_shards[index], report)
            elif is_chunked(value):
                row = ShardWithSpec(chunk_spec(unit, handle, index).as_given(value), local_shards[index])
                chunk = _checked(row.spec, value, name, report)
                if chunk is not None:
                    report.chunks.append((name, row, chunk))
            else:
                copy_full(unit, handle, index, value, prefix, report)
    finish_load(unit, state_dict, prefix + FSDP_PREFIX)


def _load_boxes(
    handle: FlatParamHandle, index: int, value: BoxedTensor, prefix: str, local_shard: torch.Tensor, report: LoadReport
) -> None:
    try:
        check_boxes(value, handle, index)
    except LoadError as error:
        report.errors.append(f"{prefix}{error}")
    else:
        report.writes.append(lambda: boxes_to_shard(value, handle, index, local_shard))


def _checked(spec: ChunkSpec, value: Any, name: str, report: LoadReport) -> torch.Tensor | None:
    if shape_of(value) != spec.shape:
        report.mismatch(name, shape_of(value), spec.shape)
        return None
    chunk, problem = fitting_chunk(spec, value)
    if problem:
        report.errors.append(f"{name}: {problem}")
    return chunk
