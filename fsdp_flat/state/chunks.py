"""Encodes sharded tensors of torch's types: each rank has a chunk of the tensor, exchanged for its local shard.

A plain parameter is split into dim-0 chunks over the shard group. A parameter that tensor parallelism has split is a
DTensor on the mesh of both groups, as in torch FSDP1: dim 0 over the shard group, then the tensor-parallel dim. If
that is dim 0 too, a rank's chunk lies on other ranks of both groups and is exchanged along one after the other.

Flat parameters need no exchange: a flat shard is the chunk of a tensor with one dim.
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

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig
from fsdp_flat.comm import RankGroup
from fsdp_flat.errors import LoadError, OptionError, UnsupportedError
from fsdp_flat.flat import PLAIN, DTensorAdapter
from fsdp_flat.layout import (
    Interval,
    IrregularPartition,
    Partition,
    ReplicatedPartition,
    chunk_partition,
    chunk_rows,
    chunk_shape,
)
from fsdp_flat.runtime import Unit
from fsdp_flat.state._torch import ShardedTensors, describe_value, dtensor, is_chunked, local_chunk, root_mesh, shape_of
from fsdp_flat.state.param_index import IndexedParam
from fsdp_flat.state.shards import LoadPlan, StateDictCodec, StateShard, TensorTransfer, redistribute

__all__ = ["ChunkCodec", "FlatCodec"]


@dataclass(frozen=True, slots=True)
class _SecondExchange:
    """Describes the exchange along the tensor-parallel group, between the rows held and the rows of the chunks."""

    rank_group: RankGroup
    held: Partition
    wanted: Partition


@dataclass(frozen=True, slots=True)
class _ChunkSpec:
    """Describes the chunks of one parameter of a unit.

    Attributes:
        chunks: partition of the flattened parameter (or its tensor-parallel part) into the ranks' chunks.
        shape: shape of the full tensor.
        chunk_shape: shape of this rank's chunk.
        mesh: the mesh of the DTensor; None for a ShardedTensor, or a plain tensor if nothing is sharded.
        placements: placements of the DTensor.
        second: the exchange along the tensor-parallel group, if the chunk needs one.
    """

    chunks: Partition
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    second: _SecondExchange | None = None


class ChunkCodec(StateDictCodec):
    """Encodes DTensors if the unit has a mesh, else ShardedTensors; plain tensors if nothing is sharded."""

    exchanges = True

    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        """Exchange parts for chunks. Each rank sends at most its own elements."""
        specs: dict[IndexedParam, _ChunkSpec] = {}
        for shard in shards:
            specs.setdefault(shard.param, _chunk_spec(shard.param))
        chunks, first, second = [], [], []
        for shard in shards:
            spec = specs[shard.param]
            chunk = shard.local.new_empty(spec.chunks[shard.param.rank_group.rank].numel)
            first.append(_transfer(shard, spec, shard.local, chunk))
            if spec.second is not None:
                held, chunk = chunk, shard.local.new_empty(math.prod(spec.chunk_shape))
                second.append(_second_transfer(shard, spec, held, chunk))
            chunks.append(chunk)
        redistribute(first)
        redistribute(second)
        tensors, found = ShardedTensors(), []
        for shard, chunk in zip(shards, chunks, strict=True):
            spec, chunk = specs[shard.param], chunk.view(specs[shard.param].chunk_shape)
            chunk = chunk.cpu() if config.offload_to_cpu else chunk
            if spec.mesh is not None:
                found.append(dtensor(chunk, spec.shape, spec.mesh, spec.placements))
            else:
                rank_group = shard.param.rank_group
                found.append(chunk if rank_group.size == 1 else tensors.make(chunk, spec.shape, rank_group))
        return found

    def reads(self, value: Any) -> bool:
        return is_chunked(value)

    def decode(self, value: Any, target: StateShard, plan: LoadPlan) -> None:
        """Plan the exchange of chunks for parts."""
        spec = _as_given(_chunk_spec(target.param), target.param.rank_group, value)
        if spec.shape != shape_of(value):
            raise LoadError(
                f"{target.label}: a tensor of shape {shape_of(value)} in chunks; expected {spec.shape}, the "
                "parameter's shape."
            )
        chunk = _fitting_chunk(spec, target, value).detach().reshape(-1)
        local = target.local
        chunk = chunk.to(dtype=local.dtype, device=local.device)
        second = None
        if spec.second is not None:
            held = local.new_empty(spec.chunks[target.param.rank_group.rank].numel)
            second = _second_transfer(target, spec, held, chunk, reverse=True)
            chunk = held
        first = _transfer(target, spec, local, chunk, reverse=True)
        plan.transfer(*((None, first) if second is None else (second, first)))
        plan.lines.append(f"{target.label}: {spec.shape} {local.dtype} in chunks")


class FlatCodec(StateDictCodec):
    """Encodes flat parameters, for the same wrapping and number of ranks: views of live memory without communication.

    With ``offload_to_cpu`` they are copies, also on the CPU.
    """

    communicates = False
    is_flat = True

    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        """Return ShardedTensors of the flat parameters."""
        tensors = ShardedTensors()
        return [
            tensors.make(
                shard.local.to("cpu", copy=True) if config.offload_to_cpu else shard.local,
                shard.shape,
                shard.param.rank_group,
            )
            for shard in shards
        ]

    def decode(self, value: Any, target: StateShard, plan: LoadPlan) -> None:
        """Plan the copy of this rank's flat shard."""
        local = local_chunk(value)
        if local is None or local.shape != target.local.shape or shape_of(value) != target.shape:
            held = "nothing readable" if local is None else f"{local.numel()} elements"
            raise LoadError(
                f"{target.label}: a local state dict fits the wrapping and number of ranks that wrote it only. Got a "
                f"{type(value).__name__} of shape {shape_of(value)}, of which rank {target.param.rank_group.rank} "
                f"holds {held}; expected {target.shape[0]} and {target.local.numel()}. Use SHARDED_STATE_DICT with "
                "torch.distributed.checkpoint, or FULL_STATE_DICT, to change either."
            )
        plan.copy(target.local, local)


def _transfer(
    shard: StateShard, spec: _ChunkSpec, local: torch.Tensor, chunk: torch.Tensor, *, reverse: bool = False
) -> TensorTransfer:
    """Describe the transfer from local shards to chunks along the shard group, or back (``reverse``)."""
    ends = (spec.chunks, shard.held, chunk, local) if reverse else (shard.held, spec.chunks, local, chunk)
    nbytes = math.prod(spec.shape) * local.itemsize
    return TensorTransfer(shard.param.rank_group, shard.param.unit.options.device, *ends, nbytes)


def _second_transfer(
    shard: StateShard, spec: _ChunkSpec, held: torch.Tensor, chunk: torch.Tensor, *, reverse: bool = False
) -> TensorTransfer:
    """Describe the transfer from rows held to chunks along the tensor-parallel group, or back (``reverse``)."""
    second = spec.second
    assert second is not None
    ends = (second.wanted, second.held, chunk, held) if reverse else (second.held, second.wanted, held, chunk)
    nbytes = math.prod(spec.shape) * held.itemsize
    return TensorTransfer(second.rank_group, shard.param.unit.options.device, *ends, nbytes)


def _as_given(spec: _ChunkSpec, rank_group: RankGroup, value: Any) -> _ChunkSpec:
    """Return the spec for a 0-dim ``value``: a DTensor is replicated, a ShardedTensor is held by one rank."""
    if spec.shape or rank_group.size == 1:
        return spec
    if isinstance(value, DTensor):
        return replace(spec, chunks=ReplicatedPartition(1, None, rank_group.size), chunk_shape=())
    own_shape = chunk_shape((), rank_group.size, rank_group.rank)
    return replace(spec, chunks=chunk_partition((), rank_group.size), chunk_shape=own_shape)


def _chunk_spec(param: IndexedParam) -> _ChunkSpec:
    """Return the spec of a parameter.

    Raises:
        UnsupportedError: tensor parallelism has split it, and no mesh contains both groups.
    """
    unit, shape, rank_group = param.unit, param.shape, param.rank_group
    if isinstance(param.adapter, DTensorAdapter):
        return _split_spec(param, param.adapter)
    assert param.adapter is PLAIN
    chunks, own_shape = chunk_partition(shape, rank_group.size), chunk_shape(shape, rank_group.size, rank_group.rank)
    if unit.options.groups.mesh is None or rank_group.size == 1:
        return _ChunkSpec(chunks, shape, own_shape)
    mesh, dim = _mesh_of(unit)
    if not shape:
        # A 0-dim tensor has no dimension to shard.
        return _ChunkSpec(ReplicatedPartition(1, None, rank_group.size), shape, shape, mesh, _placements(mesh, {}))
    return _ChunkSpec(chunks, shape, own_shape, mesh, _placements(mesh, {dim: Shard(0)}))


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


def _split_spec(param: IndexedParam, adapter: DTensorAdapter) -> _ChunkSpec:
    rank_group, part_shape, shape = param.rank_group, param.shape, tuple(adapter.shape)
    if rank_group.size == 1:
        own = ReplicatedPartition(math.prod(part_shape), None, 1)
        return _ChunkSpec(own, shape, part_shape, adapter.mesh, adapter.placements)
    root, shard_dim, split_dim = _joined_mesh(param, adapter)
    placement = adapter.placements[0]
    placements = _placements(root, {shard_dim: Shard(0), split_dim: placement})
    if not (isinstance(placement, Shard) and placement.dim == 0 and split_dim > shard_dim):
        own_shape = chunk_shape(part_shape, rank_group.size, rank_group.rank)
        return _ChunkSpec(chunk_partition(part_shape, rank_group.size), shape, own_shape, root, placements)
    # DTensor splits dim 0 over the shard group first, but tensor parallelism split it over its own group first: rows
    # change ranks in both groups.
    tp_group, width = RankGroup.of(adapter.mesh.get_group(0)), math.prod(shape[1:])
    part = chunk_rows(shape[0], tp_group.size, tp_group.rank)
    blocks = [chunk_rows(shape[0], rank_group.size, rank) for rank in range(rank_group.size)]
    in_blocks = IrregularPartition(tuple(_times(part.intersect(block).shift(-part.start), width) for block in blocks))
    block = blocks[rank_group.rank]
    parts = [chunk_rows(shape[0], tp_group.size, rank) for rank in range(tp_group.size)]
    wanted = [chunk_rows(block.numel, tp_group.size, rank).shift(block.start) for rank in range(tp_group.size)]
    second = _SecondExchange(
        tp_group,
        IrregularPartition(tuple(_times(other.intersect(block), width) for other in parts)),
        IrregularPartition(tuple(_times(rows, width) for rows in wanted)),
    )
    return _ChunkSpec(in_blocks, shape, (wanted[tp_group.rank].numel, *shape[1:]), root, placements, second)


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
    """Return this rank's chunk of a ShardedTensor or DTensor of the right shape.

    A DTensor on the spec's mesh with other placements is redistributed; every rank of the mesh must call this.

    Raises:
        LoadError: it has other chunks.
    """
    if isinstance(value, DTensor) and spec.mesh is not None and value.device_mesh == spec.mesh:
        if tuple(value.placements) != spec.placements:
            value = value.redistribute(spec.mesh, spec.placements)
    elif spec.second is not None:
        raise LoadError(
            f"{target.label}: expected a DTensor on {spec.mesh} with placements {spec.placements}, got "
            f"{describe_value(value)}."
        )
    try:
        chunk = local_chunk(value)
    except OptionError as error:
        raise LoadError(f"{target.label}: {error}.") from None
    assert chunk is not None
    if chunk.numel() == math.prod(spec.chunk_shape) and (chunk.numel() == 0 or chunk.shape == spec.chunk_shape):
        return chunk
    rank_group = target.param.rank_group
    raise LoadError(
        f"{target.label}: rank {rank_group.rank} of the shard group holds a chunk of shape {tuple(chunk.shape)} in a "
        f"{describe_value(value)}; expected {spec.chunk_shape} at {rank_group.size} ranks. Load checkpoints of another "
        "number of ranks through torch.distributed.checkpoint, which reshards."
    )
