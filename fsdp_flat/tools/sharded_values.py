"""Finds which part of a tensor a rank has saved as a ShardedTensor or a DTensor, from descriptions of these objects."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from fsdp_flat.errors import LoadError
from fsdp_flat.tools.stored_checkpoint import Part
from fsdp_flat.tools.torch_archives import Described, StoredSubclass, StoredTensor


def parts_of(value: StoredSubclass, file: Path, rank: int) -> tuple[Part, ...] | None:
    """Return this rank's parts of a tensor; None for another class of tensors.

    Args:
        value: the description of the tensor.
        file: the file that it is in.
        rank: the rank that wrote the file, for DTensors of torch versions that do not store it.

    Raises:
        LoadError: the sharding is one that cannot be described by boxes.
    """
    if value.kind == "ShardedTensor":
        shards = value.state[0]
        return tuple(_part_of_shard(_fields(shard), file, rank) for shard in shards)
    if value.kind == "DTensor":
        fields = _fields(value)
        return (_part_of_dtensor(value.shape, fields["_local_tensor"], _fields(fields["_spec"]), file, rank),)
    return None


def _fields(described: Any) -> dict[str, Any]:
    """Return the attributes of a described object, whether it has slots or not."""
    states = described.state if isinstance(described.state, tuple) else (described.state,)
    return {name: value for state in states if isinstance(state, Mapping) for name, value in state.items()}


def _part(offsets: list[int], local: StoredTensor, file: Path, rank: int) -> Part:
    return Part(tuple(offsets), local.shape, lambda: local, file, rank)


def _part_of_shard(shard: Mapping[str, Any], file: Path, rank: int) -> Part:
    metadata = _fields(shard["metadata"])
    placement = metadata.get("placement")
    writer = _fields(placement).get("_rank") if isinstance(placement, Described) else None
    return _part(list(metadata["shard_offsets"]), shard["tensor"], file, rank if writer is None else writer)


def _part_of_dtensor(
    shape: tuple[int, ...], local: StoredTensor, spec: Mapping[str, Any], file: Path, rank: int
) -> Part:
    mesh = _fields(spec["mesh"])
    coordinate = mesh.get("_coordinate_on_dim")
    if not coordinate:
        raise LoadError(f"{file} does not say where in the mesh of its DTensors the rank is that wrote it.")
    offsets, sizes = [0] * len(shape), list(shape)
    for placement, num, at in zip(spec["placements"], _mesh_shape(mesh), coordinate, strict=True):
        name = placement.kind.rpartition(".")[2]
        if name == "Shard":
            dim = _fields(placement)["dim"]
            most = -(-sizes[dim] // num)
            start, stop = (min(most * index, sizes[dim]) for index in (at, at + 1))
            offsets[dim], sizes[dim] = offsets[dim] + start, stop - start
        elif name != "Replicate":
            raise LoadError(f"{file} has a DTensor with the placement {name}, which is no box of the tensor.")
    if local.shape != tuple(sizes):
        raise LoadError(f"{file} has a part of shape {local.shape} where its placements give {tuple(sizes)}.")
    return _part(offsets, local, file, mesh.get("_rank", rank))


def _mesh_shape(mesh: Mapping[str, Any]) -> list[int]:
    """Return the shape of a mesh, of which torch has stored the ranks, and then a layout in two forms."""
    if "_layout" not in mesh:
        return list(mesh["mesh"].shape)
    layout = _fields(mesh["_layout"])
    each = [_fields(axis)["shape"] for axis in layout["axes"]] if "axes" in layout else layout["shape"]
    return [
        size if isinstance(size, int) else prod(size) for size in (each if isinstance(each, (list, tuple)) else [each])
    ]
