"""Assigns chunks of a parameter to ranks for sharded state dicts, and converts local shards to chunks and back.

A plain parameter is split into dim-0 chunks over the shard group. A parameter that tensor parallelism has split is a
DTensor on the mesh of both groups, as in torch FSDP1: dim 0 over the shard group, then the tensor-parallel dim. If
that is dim 0 too, a rank's chunk lies on other ranks of both groups and is exchanged along one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_flat.comm import P2PChannels, RankGroup
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.flat import PLAIN, DTensorAdapter, FlatParamHandle
from fsdp_flat.layout import (
    Interval,
    IrregularPartition,
    Partition,
    ReplicatedPartition,
    TransferPlan,
    chunk_partition,
    chunk_rows,
    chunk_shape,
    plan_transfer,
)
from fsdp_flat.runtime import Unit
from fsdp_flat.state._torch import root_mesh
from fsdp_flat.state.torch_types import ShardedTensors, describe_value, dtensor, local_chunk

__all__ = [
    "ChunkSpec",
    "ShardWithSpec",
    "chunk_spec",
    "chunks_of",
    "fitting_chunk",
    "plan_full_transfer",
    "write_chunks",
]


@dataclass(frozen=True, slots=True)
class _SecondExchange:
    """Describes the exchange along the tensor-parallel group, between the rows held and the rows of the chunks."""

    rank_group: RankGroup
    held: Partition
    wanted: Partition


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """Describes the chunks of one parameter of a unit in sharded state dicts.

    Attributes:
        device: the compute device.
        rank_group: the shard group.
        local_shards: partition of the flattened parameter (or its tensor-parallel part) into the ranks' local shards.
        chunks: partition of the same elements into the ranks' chunks.
        shape: shape of the full tensor.
        chunk_shape: shape of this rank's chunk.
        mesh: the mesh of the DTensor; None for a ShardedTensor, or a plain tensor if nothing is sharded.
        placements: placements of the DTensor.
        second: the exchange along the tensor-parallel group, if the chunk needs one.
    """

    device: torch.device
    rank_group: RankGroup
    local_shards: Partition
    chunks: Partition
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    second: _SecondExchange | None

    def as_given(self, value: torch.Tensor) -> ChunkSpec:
        """Return the spec for a 0-dim ``value``: a DTensor is replicated, a ShardedTensor is held by one rank."""
        if self.shape or self.rank_group.size == 1:
            return self
        if isinstance(value, DTensor):
            return replace(self, chunks=ReplicatedPartition(1, None, self.rank_group.size), chunk_shape=())
        own_shape = chunk_shape((), self.rank_group.size, self.rank_group.rank)
        return replace(self, chunks=chunk_partition((), self.rank_group.size), chunk_shape=own_shape)

    def to_torch_type(self, chunk: torch.Tensor, tensors: ShardedTensors) -> torch.Tensor:
        """Return ``chunk`` as a DTensor, ShardedTensor or plain tensor; ``tensors`` is shared by one save."""
        if self.mesh is not None:
            return dtensor(chunk, self.shape, self.mesh, self.placements)
        if self.rank_group.size == 1:
            return chunk
        return tensors.make(chunk, self.shape, self.rank_group)


@dataclass(frozen=True, slots=True)
class ShardWithSpec:
    """Holds one tensor to save or load: a parameter, or an optimizer state of it.

    Attributes:
        spec: the parameter's spec.
        local_shard: this rank's local shard (1-D), the source of a save or the target of a load.
    """

    spec: ChunkSpec
    local_shard: torch.Tensor


def plan_full_transfer(handle: FlatParamHandle, index: int, rank: int, dst: int | None) -> TransferPlan:
    """Plan the transfers of rank ``rank`` of the shard group that unshard a parameter on rank ``dst`` (None: all)."""
    held = handle.layout.partition(index)
    return plan_transfer(held, ReplicatedPartition(held.numel, dst, held.size), rank)


def chunk_spec(unit: Unit, handle: FlatParamHandle, index: int) -> ChunkSpec:
    """Return the spec of parameter ``index``.

    Raises:
        UnsupportedError: tensor parallelism has split the parameter, and no mesh contains both groups.
    """
    groups = unit.options.groups
    shape = handle.layout.param_infos[index].shape
    adapter = handle.views.params[index].adapter
    rank_group, local_shards = groups.shard, handle.layout.partition(index)
    if isinstance(adapter, DTensorAdapter):
        return _split_spec(unit, handle.layout.param_infos[index].fqn, shape, adapter, local_shards)
    assert adapter is PLAIN
    mesh: Any = None
    placements: tuple[Placement, ...] = ()
    if groups.mesh is not None and rank_group.size > 1:
        mesh, dim = _mesh_of(unit)
        if not shape:
            # A 0-dim tensor has no dimension to shard.
            whole = ReplicatedPartition(1, None, rank_group.size)
            return ChunkSpec(
                unit.options.device, rank_group, local_shards, whole, shape, shape, mesh, _placements(mesh, {}), None
            )
        placements = _placements(mesh, {dim: Shard(0)})
    chunks, own_shape = chunk_partition(shape, rank_group.size), chunk_shape(shape, rank_group.size, rank_group.rank)
    return ChunkSpec(unit.options.device, rank_group, local_shards, chunks, shape, own_shape, mesh, placements, None)


def _mesh_of(unit: Unit) -> tuple[Any, int]:
    """Return the mesh of DTensors and its shard dim: the mesh that the unit's was sliced from, as in FSDP1."""
    mesh = unit.options.groups.mesh
    dim = 1 if unit.options.strategy.is_hybrid else 0
    root = root_mesh(mesh)
    names, all_names = mesh.mesh_dim_names, root.mesh_dim_names
    if root.ndim > mesh.ndim and names and all_names and names[dim] in all_names:
        return root, all_names.index(names[dim])
    return mesh, dim


def _placements(mesh: DeviceMesh, by_dim: dict[int, Placement]) -> tuple[Placement, ...]:
    return tuple(by_dim.get(dim, Replicate()) for dim in range(mesh.ndim))


def _split_spec(
    unit: Unit, name: str, local_shape: tuple[int, ...], adapter: DTensorAdapter, local_shards: Partition
) -> ChunkSpec:
    rank_group, whole = unit.options.groups.shard, tuple(adapter.shape)
    if rank_group.size == 1:
        own = ReplicatedPartition(math.prod(local_shape), None, 1)
        return ChunkSpec(
            unit.options.device,
            rank_group,
            local_shards,
            own,
            whole,
            local_shape,
            adapter.mesh,
            adapter.placements,
            None,
        )
    root, shard_dim, split_dim = _joined_mesh(unit, name, adapter)
    placement = adapter.placements[0]
    placements = _placements(root, {shard_dim: Shard(0), split_dim: placement})
    if not (isinstance(placement, Shard) and placement.dim == 0 and split_dim > shard_dim):
        chunks, own_shape = (
            chunk_partition(local_shape, rank_group.size),
            chunk_shape(local_shape, rank_group.size, rank_group.rank),
        )
        return ChunkSpec(
            unit.options.device, rank_group, local_shards, chunks, whole, own_shape, root, placements, None
        )
    # DTensor splits dim 0 over the shard group first, but tensor parallelism split it over its own group first: rows
    # change ranks in both groups.
    tp_group = RankGroup.of(adapter.mesh.get_group(0))
    width = math.prod(whole[1:])
    part = chunk_rows(whole[0], tp_group.size, tp_group.rank)
    blocks = [chunk_rows(whole[0], rank_group.size, rank) for rank in range(rank_group.size)]
    in_blocks = IrregularPartition(tuple(_times(part.intersect(block).shift(-part.start), width) for block in blocks))
    block = blocks[rank_group.rank]
    parts = [chunk_rows(whole[0], tp_group.size, rank) for rank in range(tp_group.size)]
    wanted = [chunk_rows(block.numel, tp_group.size, rank).shift(block.start) for rank in range(tp_group.size)]
    second = _SecondExchange(
        tp_group,
        IrregularPartition(tuple(_times(other.intersect(block), width) for other in parts)),
        IrregularPartition(tuple(_times(rows, width) for rows in wanted)),
    )
    own_shape = (wanted[tp_group.rank].numel, *whole[1:])
    return ChunkSpec(
        unit.options.device, rank_group, local_shards, in_blocks, whole, own_shape, root, placements, second
    )


def fitting_chunk(spec: ChunkSpec, value: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """Return this rank's chunk of a ShardedTensor or DTensor of the right shape, or None and an error text.

    A DTensor on the spec's mesh with other placements is redistributed; every rank of the mesh must call this.
    """
    rank = spec.rank_group.rank
    if isinstance(value, DTensor) and spec.mesh is not None and value.device_mesh == spec.mesh:
        if tuple(value.placements) != spec.placements:
            value = value.redistribute(spec.mesh, spec.placements)
    elif spec.second is not None:
        return (
            None,
            f"expected a DTensor on {spec.mesh} with placements {spec.placements}, got {describe_value(value)}.",
        )
    try:
        chunk = local_chunk(value)
    except OptionError as error:
        return None, f"{error}."
    assert chunk is not None
    if chunk.numel() == math.prod(spec.chunk_shape) and (chunk.numel() == 0 or chunk.shape == spec.chunk_shape):
        return chunk, ""
    return None, (
        f"rank {rank} of the shard group holds a chunk of shape {tuple(chunk.shape)} in a {describe_value(value)}; "
        f"expected {spec.chunk_shape} at {spec.rank_group.size} ranks. Load checkpoints of another number of ranks "
        "through torch.distributed.checkpoint, which reshards."
    )


def _times(rows: Interval, width: int) -> Interval:
    return Interval(rows.start * width, rows.stop * width)


def _joined_mesh(unit: Unit, name: str, adapter: DTensorAdapter) -> tuple[Any, int, int]:
    mesh = unit.options.groups.mesh
    if mesh is not None and adapter.mesh.ndim == 1:
        root, shard_dim = _mesh_of(unit)
        names, split = root.mesh_dim_names, adapter.mesh.mesh_dim_names
        if root_mesh(adapter.mesh) == root and names and split and split[0] in names:
            return root, shard_dim, names.index(split[0])
    raise UnsupportedError(
        f"A sharded state dict of unit {unit.name!r} holds {name!r}, a DTensor over {adapter.mesh}, for which it needs "
        "one mesh of both groups. Make it by init_device_mesh(device_type, (num_data, num_tensor), "
        'mesh_dim_names=("dp", "tp")) and pass device_mesh=mesh["dp"] to FullyShardedDataParallel and mesh["tp"] to '
        "parallelize_module, or use FULL_STATE_DICT."
    )


def chunks_of(rows: Sequence[ShardWithSpec], *, offload: bool) -> list[torch.Tensor]:
    """Exchange local shards for this rank's chunks, returned as DTensors or ShardedTensors.

    Every rank of the shard groups must call this with the same rows. Each rank sends at most the size of its shard.

    Args:
        rows: the tensors.
        offload: return the chunks on the CPU.
    """
    found = []
    transfers = _ChunkExchange()
    for row in rows:
        spec = row.spec
        target = row.local_shard.new_empty(spec.chunks[spec.rank_group.rank].numel)
        transfers.add(spec, spec.rank_group, spec.local_shards, spec.chunks, row.local_shard, target)
        found.append(target)
    transfers.wait()
    for index, row in enumerate(rows):
        second = row.spec.second
        if second is not None:
            target = row.local_shard.new_empty(math.prod(row.spec.chunk_shape))
            transfers.add(row.spec, second.rank_group, second.held, second.wanted, found[index], target)
            found[index] = target
    transfers.wait()
    tensors = ShardedTensors()
    chunks = (chunk.view(row.spec.chunk_shape) for row, chunk in zip(rows, found, strict=True))
    typed = zip(rows, chunks, strict=True)
    return [row.spec.to_torch_type(chunk.cpu() if offload else chunk, tensors) for row, chunk in typed]


def write_chunks(rows: Sequence[tuple[ShardWithSpec, torch.Tensor]]) -> None:
    """Write this rank's chunks into every rank's local shards; the inverse of :func:`chunks_of`.

    Every rank of the shard groups must call this with the same rows.

    Args:
        rows: the tensors, each with this rank's chunk.
    """
    transfers = _ChunkExchange()
    found = []
    for row, chunk in rows:
        source = chunk.detach().reshape(-1).to(dtype=row.local_shard.dtype, device=row.local_shard.device)
        second = row.spec.second
        if second is not None:
            middle = row.local_shard.new_empty(row.spec.chunks[row.spec.rank_group.rank].numel)
            transfers.add(row.spec, second.rank_group, second.wanted, second.held, source, middle)
            source = middle
        found.append(source)
    transfers.wait()
    with torch.no_grad():
        for (row, _), source in zip(rows, found, strict=True):
            transfers.add(
                row.spec, row.spec.rank_group, row.spec.chunks, row.spec.local_shards, source, row.local_shard
            )
        transfers.wait()


class _ChunkExchange:
    """Holds the transfers in flight of one save or load."""

    def __init__(self) -> None:
        self._channels = P2PChannels()

    def add(
        self,
        spec: ChunkSpec,
        rank_group: RankGroup,
        held: Partition,
        wanted: Partition,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        transfer_plan = plan_transfer(held, wanted, rank_group.rank)
        nbytes = math.prod(spec.shape) * target.itemsize
        self._channels.add(rank_group, spec.device, transfer_plan, source, target, nbytes=nbytes)

    def wait(self) -> None:
        self._channels.wait()
