"""torch's two types for a tensor of which every rank holds a dim-0 chunk, made and read without communication."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from fsdp_flat.comm import Axis
from fsdp_flat.layout import chunk_interval, chunk_shape

__all__ = ["chunked", "dtype_of", "flat_sharded", "local_chunk", "shape_of"]


def chunked(chunk: torch.Tensor, shape: tuple[int, ...], axis: Axis, mesh: Any) -> torch.Tensor:
    """A tensor of ``shape`` of which this rank holds ``chunk``: a DTensor with a mesh, else a ShardedTensor.

    Source of the form: torch FSDP1's sharded state dicts (dim-0 chunks, placements ``rank:<global rank>/<device>``;
    on a 2-D mesh the first dim replicates).
    """
    if mesh is not None:
        placements = [Replicate()] * (mesh.ndim - 1) + [ShardPlacement(0)]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(chunk, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    metadata = []
    for rank in range(axis.size):
        size = chunk_shape(shape, axis.size, rank)
        if size and size[0] == 0:
            continue
        offsets = [0] * len(shape)
        if shape and chunk.dim():
            offsets[0] = _first_row(shape, axis.size, rank)
        metadata.append((rank, offsets, list(size)))
    return _sharded_tensor(chunk, shape, axis, metadata)


def _first_row(shape: tuple[int, ...], size: int, rank: int) -> int:
    width = 1
    for dim in shape[1:]:
        width *= dim
    return chunk_interval(shape, size, rank).start // max(1, width)


def flat_sharded(local: torch.Tensor, shard_numel: int, numel: int, axis: Axis) -> torch.Tensor:
    """A 1-D ShardedTensor of ``numel`` elements, ``shard_numel`` a rank, of which this rank holds ``local``."""
    metadata = [
        (rank, [rank * shard_numel], [min(shard_numel, numel - rank * shard_numel)])
        for rank in range(axis.size)
        if rank * shard_numel < numel
    ]
    return _sharded_tensor(local, (numel,), axis, metadata)


def _sharded_tensor(
    local: torch.Tensor, shape: tuple[int, ...], axis: Axis, metadata: list[tuple[int, list[int], list[int]]]
) -> torch.Tensor:
    shards = [ShardMetadata(offsets, sizes, _placement(axis, rank, local.device)) for rank, offsets, sizes in metadata]
    own = [Shard(local, shard) for (rank, _, _), shard in zip(metadata, shards, strict=True) if rank == axis.rank]
    properties = TensorProperties(
        dtype=local.dtype,
        layout=local.layout,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=local.is_pinned(),
    )
    whole = ShardedTensorMetadata(shards_metadata=shards, size=torch.Size(shape), tensor_properties=properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own, sharded_tensor_metadata=whole, process_group=axis.group
    )


def _placement(axis: Axis, rank: int, device: torch.device) -> str:
    assert axis.group is not None
    world_rank = dist.get_global_rank(axis.group, rank)
    if device.type == "cpu":
        return f"rank:{world_rank}/cpu"
    return f"rank:{world_rank}/{device.type}:{rank % torch.accelerator.device_count()}"


def local_chunk(value: Any) -> torch.Tensor | None:
    """What this rank holds of a ShardedTensor or DTensor; None of anything else.

    Raises:
        ValueError: a ShardedTensor with several local shards.
    """
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        if len(shards) > 1:
            raise ValueError(f"expected at most one local shard, got {len(shards)}")
        return shards[0].tensor if shards else torch.empty(0, dtype=dtype_of(value))
    return None


def shape_of(value: Any) -> tuple[int, ...]:
    """The whole shape of a tensor of any kind; ``()`` for what is no tensor."""
    # Every tensor attribute of a ShardedTensor warns that the class is deprecated; its own metadata do not.
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else getattr(value, "shape", ()))


def dtype_of(value: Any) -> torch.dtype:
    """The dtype of a tensor of any kind."""
    dtype: torch.dtype = (value.metadata().tensor_properties if isinstance(value, ShardedTensor) else value).dtype
    return dtype
