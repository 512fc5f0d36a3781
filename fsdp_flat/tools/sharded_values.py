"""Finds which part of a tensor a rank has saved as a ShardedTensor or a DTensor."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from fsdp_flat.errors import LoadError
from fsdp_flat.layout import chunk_rows
from fsdp_flat.tools.stored_checkpoint import Part


def parts_of(value: Any, file: Path, rank: int) -> tuple[Part, ...] | None:
    """Return this rank's parts of a tensor; None for anything else.

    Args:
        value: a DTensor, or the description of one or of a ShardedTensor.
        file: the file that it is in.
        rank: the rank that wrote the file, for DTensors of torch versions that do not store it.

    Raises:
        LoadError: the sharding is one that cannot be described by boxes.
    """
    kind = type(value).__name__
    if kind == "ShardedTensor":
        return tuple(_part_of_shard(shard, file, rank) for shard in value.state[0])
    if kind == "DTensor":
        return (_part_of_dtensor(value, file, rank),)
    return None


def _part(offsets: list[int], local: torch.Tensor, file: Path, rank: int) -> Part:
    return Part(tuple(offsets), tuple(local.shape), local.detach, file, rank)


def _part_of_shard(shard: Any, file: Path, rank: int) -> Part:
    writer = getattr(shard.metadata.placement, "_rank", None)
    return _part(list(shard.metadata.shard_offsets), shard.tensor, file, rank if writer is None else writer)


def _part_of_dtensor(value: Any, file: Path, rank: int) -> Part:
    # Attributes that an object and its description have alike.
    mesh, local = value._spec.mesh, value._local_tensor
    coordinate = getattr(mesh, "_coordinate_on_dim", None)
    if not coordinate:
        raise LoadError(f"{file} does not say where in the mesh of its DTensors the rank is that wrote it.")
    offsets, sizes = [0] * len(value.shape), list(value.shape)
    for placement, num, at in zip(value._spec.placements, _mesh_shape(mesh), coordinate, strict=True):
        name = type(placement).__name__
        if name == "Shard":
            rows = chunk_rows(sizes[placement.dim], num, at)
            offsets[placement.dim], sizes[placement.dim] = offsets[placement.dim] + rows.start, rows.numel
        elif name != "Replicate":
            raise LoadError(f"{file} has a DTensor with the placement {name}, which is no box of the tensor.")
    if tuple(local.shape) != tuple(sizes):
        raise LoadError(f"{file} has a part of shape {tuple(local.shape)} where its placements give {tuple(sizes)}.")
    return _part(offsets, local, file, getattr(mesh, "_rank", rank))


def _mesh_shape(mesh: Any) -> list[int]:
    """Return the shape of a mesh, of which torch has stored the ranks, and then a layout in two forms."""
    layout = getattr(mesh, "_layout", None)
    if layout is None:
        return list(mesh.mesh.shape)
    each = [axis.shape for axis in layout.axes] if hasattr(layout, "axes") else layout.shape
    return [
        size if isinstance(size, int) else prod(size) for size in (each if isinstance(each, (list, tuple)) else [each])
    ]
