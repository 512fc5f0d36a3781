"""Encodes sharded tensors of torch's types: each rank has a chunk of the tensor, exchanged for its local shard.

A plain parameter is split into dim-0 chunks over the shard group. A parameter that tensor parallelism has split is a
DTensor on the mesh of both groups, as in torch FSDP1: dim 0 over the shard group, then the tensor-parallel dim. If
that is dim 0 too, a rank's chunk lies on other ranks of both groups and is exchanged along one after the other.

Flat parameters need no exchange: a flat shard is the chunk of a tensor with one dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_flat.comm import RankGroup
from fsdp_flat.core import DTensorAdapter, Unit
from fsdp_flat.errors import LoadError, UnsupportedError, counted
from fsdp_flat.layout import (
    Interval,
    IrregularPartition,
    Partition,
    ReplicatedPartition,
    chunk_partition,
    chunk_rows,
    chunk_shape,
)
from fsdp_flat.state.shards import (
    Config,
    IndexedParam,
    PendingWrites,
    StateDictCodec,
    StateShard,
    TensorTransfer,
    shape_of,
)
from fsdp_flat.state.torch_state import ShardedTensors, dtensor, is_sharded_over, local_chunk, root_mesh


@dataclass(frozen=True, slots=True)
class _ChunkSpec:
    """Describes the chunks of one parameter, or of a state of it.

    Attributes:
        exchanges: from local shards to chunks: each group, with the partitions before and after.
        shape: shape of the full tensor.
        chunk_shape: shape of this rank's chunk.
        mesh, placements: those of the DTensor; no mesh for a ShardedTensor, or a plain tensor if nothing is sharded.
    """

    exchanges: tuple[tuple[RankGroup, Partition, Partition], ...]
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    def transfers(self, shard: StateShard, chunk: torch.Tensor) -> list[TensorTransfer]:
        """Return the transfers from local shards to chunks."""
        group, _, between = self.exchanges[0]
        middle = [shard.local.new_empty(between[group.rank].numel)] if len(self.exchanges) == 2 else []
        device, nbytes = shard.param.unit.options.device, math.prod(self.shape) * chunk.itemsize
        each = zip(self.exchanges, [shard.local, *middle], [*middle, chunk], strict=True)
        return [TensorTransfer(*exchange, source, target, device, nbytes) for exchange, source, target in each]


class ChunkCodec(StateDictCodec):
    """Encodes DTensors if the unit has a mesh, else ShardedTensors; plain tensors if nothing is sharded."""

    exchanges = True
    kinds = (DTensor, ShardedTensor)

    def encode(self, shards: Sequence[StateShard], config: Config) -> list[Any]:
        specs: dict[tuple[IndexedParam, int | None], _ChunkSpec] = {}
        writes, chunks = PendingWrites(), []
        for shard in shards:
            key = (shard.param, shard.owner)
            spec = specs[key] = specs.get(key) or _chunk_spec(shard)
            chunk = shard.local.new_empty(spec.chunk_shape)
            writes.transfer(*spec.transfers(shard, chunk.view(-1)))
            chunks.append((spec, chunk, shard.param.rank_group))
        writes.commit()
        tensors, found = ShardedTensors(), []
        for spec, chunk, rank_group in chunks:
            if spec.mesh is not None:
                # DTensor.from_local would move a chunk on the CPU back to the mesh's device.
                made = dtensor(chunk, spec.shape, spec.mesh, spec.placements)
                found.append(made.cpu() if config.offload_to_cpu else made)
            else:
                chunk = chunk.cpu() if config.offload_to_cpu else chunk
                found.append(chunk if rank_group.size == 1 else tensors.make(chunk, spec.shape, rank_group))
        return found

    def decode(self, value: Any, target: StateShard, writes: PendingWrites) -> None:
        spec, local = _chunk_spec(target, value), target.local
        chunk = _fitting_chunk(spec, target, value).detach().reshape(-1).to(dtype=local.dtype, device=local.device)
        writes.transfer(*[each.reversed() for each in reversed(spec.transfers(target, chunk))])
        writes.describe(target, f"{spec.shape} {local.dtype} in chunks")


class FlatCodec(StateDictCodec):
    """Encodes flat parameters as ShardedTensors, for the same wrapping and number of ranks.

    They are views of live memory, or copies on the CPU.
    """

    communicates = False
    is_flat = True

    def fits(self, value: Any, target: StateShard) -> bool:
        return True  # decoding compares each rank's part too

    def encode(self, shards: Sequence[StateShard], config: Config) -> list[Any]:
        tensors, found = ShardedTensors(), []
        for shard in shards:
            local = shard.local.to("cpu", copy=True) if config.offload_to_cpu else shard.local
            found.append(tensors.make(local, shard.shape, shard.param.rank_group))
        return found

    def decode(self, value: Any, target: StateShard, writes: PendingWrites) -> None:
        local = local_chunk(value, target.label)
        if local is None or local.shape != target.local.shape or shape_of(value) != target.shape:
            held = "nothing readable" if local is None else counted(local.numel(), "elements")
            raise LoadError(
                f"{target.label}: a local state dict fits the wrapping and number of ranks that wrote it only. Got a "
                f"{type(value).__name__} of shape {shape_of(value)}, of which rank {target.param.rank_group.rank} "
                f"holds {held}; expected {target.shape[0]} and {target.local.numel()}. Use SHARDED_STATE_DICT with "
                "torch.distributed.checkpoint, or FULL_STATE_DICT, to change either."
            )
        writes.copy(target.local, local)


def _chunk_spec(shard: StateShard, given: Any = None) -> _ChunkSpec:
    """Return the spec of a tensor, for a load that of the value ``given``."""
    param, rank_group, adapter, part_shape = shard.param, shard.param.rank_group, shard.param.adapter, shard.param.shape
    replicas = param.unit.options.groups.replicate
    is_split = rank_group.size > 1 or isinstance(adapter, DTensorAdapter)
    if isinstance(given, ShardedTensor) and not is_split and is_sharded_over(given, replicas):
        # ``load_sharded_optimizer_state_dict`` shards over all ranks, whatever the strategy is.
        exchange = (
            replicas,
            ReplicatedPartition(math.prod(shard.shape), None, replicas.size),
            chunk_partition(shard.shape, replicas.size),
        )
        return _ChunkSpec((exchange,), shard.shape, chunk_shape(shard.shape, replicas.size, replicas.rank))
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    if isinstance(adapter, DTensorAdapter):
        mesh, placements = adapter.mesh, adapter.placements
        if rank_group.size > 1:
            mesh, dim, split_dim = _joined_mesh(param, adapter)
            split = placements[0]
            placements = _placements(mesh, {**({dim: Shard(0)} if part_shape else {}), split_dim: split})
            if isinstance(split, Shard) and split.dim == 0 and split_dim > dim:
                return _split_twice(shard, adapter, mesh, placements)
    elif param.unit.options.groups.mesh is not None and rank_group.size > 1:
        mesh, dim = _mesh_of(param.unit)
        placements = _placements(mesh, {dim: Shard(0)} if part_shape else {})
    wanted: Partition = chunk_partition(part_shape, rank_group.size)
    own_shape = chunk_shape(part_shape, rank_group.size, rank_group.rank)
    if not part_shape and (mesh is not None if given is None else isinstance(given, DTensor)):
        # A DTensor has no dim to shard here; a 0-dim ShardedTensor is on one rank.
        wanted, own_shape = ReplicatedPartition(1, None, rank_group.size), ()
    return _ChunkSpec(((rank_group, shard.held, wanted),), param.full_shape, own_shape, mesh, placements)


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


def _split_twice(
    shard: StateShard, adapter: DTensorAdapter, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> _ChunkSpec:
    """Return the spec of a tensor whose rows change ranks in both groups.

    DTensor splits dim 0 over the shard group first, but tensor parallelism split it over its own group first.
    """
    rank_group, shape = shard.param.rank_group, tuple(adapter.shape)
    tp_group, width = RankGroup.of(adapter.mesh.get_group(0)), math.prod(shape[1:])
    part = chunk_rows(shape[0], tp_group.size, tp_group.rank)
    blocks = [chunk_rows(shape[0], rank_group.size, rank) for rank in range(rank_group.size)]
    in_blocks = IrregularPartition(tuple(_times(part.intersect(block).shift(-part.start), width) for block in blocks))
    block = blocks[rank_group.rank]
    parts = [chunk_rows(shape[0], tp_group.size, rank) for rank in range(tp_group.size)]
    wanted = [chunk_rows(block.numel, tp_group.size, rank).shift(block.start) for rank in range(tp_group.size)]
    second = (
        tp_group,
        IrregularPartition(tuple(_times(other.intersect(block), width) for other in parts)),
        IrregularPartition(tuple(_times(rows, width) for rows in wanted)),
    )
    own_shape = (wanted[tp_group.rank].numel, *shape[1:])
    return _ChunkSpec(((rank_group, shard.held, in_blocks), second), shape, own_shape, mesh, placements)


def _times(rows: Interval, width: int) -> Interval:
    return Interval(rows.start * width, rows.stop * width)


def _joined_mesh(param: IndexedParam, adapter: DTensorAdapter) -> tuple[Any, int, int]:
    unit, mesh = param.unit, param.unit.options.groups.mesh
    if mesh is not None and adapter.mesh.ndim == 1:
        root, shard_dim = _mesh_of(unit)
        names, split = root.mesh_dim_names, adapter.mesh.mesh_dim_names
        if root_mesh(adapter.mesh) == root and names and split and split[0] in names:
            return root, shard_dim, names.index(split[0])
    raise UnsupportedError(
        f"A sharded state dict of unit {unit.name!r} holds {param.fqn!r}, a DTensor over {adapter.mesh}, for which it "
        "needs one mesh of both groups. Make it by init_device_mesh(device_type, (num_data, num_tensor), "
        'mesh_dim_names=("dp", "tp")) and pass device_mesh=mesh["dp"] to FullyShardedDataParallel and mesh["tp"] to '
        "parallelize_module, or use FULL_STATE_DICT."
    )


def _fitting_chunk(spec: _ChunkSpec, target: StateShard, value: Any) -> torch.Tensor:
    """Return this rank's chunk of a ShardedTensor or DTensor, or raise a LoadError if it has other chunks.

    A DTensor on the spec's mesh with other placements is redistributed; every rank of the mesh must call this.
    """
    if isinstance(value, DTensor) and spec.mesh is not None and value.device_mesh == spec.mesh:
        if tuple(value.placements) != spec.placements:
            value = value.redistribute(spec.mesh, spec.placements)
    elif len(spec.exchanges) > 1:
        raise LoadError(
            f"{target.label}: expected a DTensor on {spec.mesh} with placements {spec.placements}, got "
            f"{_kind_of(value)}."
        )
    chunk = local_chunk(value, target.label)
    assert chunk is not None
    if chunk.numel() == math.prod(spec.chunk_shape) and (chunk.numel() == 0 or chunk.shape == spec.chunk_shape):
        return chunk
    rank_group = target.param.rank_group
    raise LoadError(
        f"{target.label}: rank {rank_group.rank} of the shard group holds a chunk of shape {tuple(chunk.shape)} in a "
        f"{_kind_of(value)}; expected {spec.chunk_shape}, since its shard group has {rank_group.size} "
        "rank(s). Load full tensors, or load the checkpoint into the state dicts of this model and its optimizer "
        "through torch.distributed.checkpoint, which reshards."
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, DTensor):
        return f"DTensor with placements {tuple(value.placements)} on {value.device_mesh}"
    return f"{type(value).__name__} of shape {shape_of(value)}"
