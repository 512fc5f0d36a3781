"""The form of sharded state dicts: which chunk of a parameter each rank has, and how pieces become chunks.

A plain parameter is cut into dim-0 chunks over the shard axis. A parameter that tensor parallelism has split is a
DTensor on the mesh of both axes, as in torch FSDP1: dim 0 over the shard axis, then what tensor parallelism splits.
Where that is dim 0 too, the chunk of a rank lies on other ranks of both axes; it is fetched along one after the other.
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

from fsdp_flat.comm import Axis, Lanes
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.flat import PLAIN, DTensorGuise, FlatParamHandle
from fsdp_flat.layout import Interval, Moves, Runs, Spread, Whole, chunk_cut, chunk_rows, chunk_shape, moves_between
from fsdp_flat.runtime import Unit
from fsdp_flat.state_dict._torch import root_mesh
from fsdp_flat.state_dict.torch_types import ShardedTensors, describe, dtensor, local_chunk

__all__ = ["ChunkForm", "Row", "chunk_form", "chunks_of", "fitting_chunk", "whole_moves", "write_chunks"]


@dataclass(frozen=True, slots=True)
class _Second:
    """The way along the tensor-parallel axis: between the rows that lie there and those of the chunks."""

    axis: Axis
    held: Spread
    wanted: Spread


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """How one parameter of a unit lies in sharded state dicts.

    Attributes:
        device: the device of compute.
        axis: the shard axis.
        pieces: its ranks' pieces of the flattened parameter (of the tensor-parallel part where it is split).
        chunks: their chunks, in the same elements.
        shape: shape of the whole tensor.
        chunk_shape: shape of this rank's chunk.
        mesh: the mesh of the DTensor; None for a ShardedTensor, or a plain tensor where nothing is sharded.
        placements: those of the DTensor.
        second: where the chunk is fetched along the tensor-parallel axis too.
    """

    device: torch.device
    axis: Axis
    pieces: Spread
    chunks: Spread
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    second: _Second | None

    def as_given(self, value: torch.Tensor) -> ChunkForm:
        """This form for a 0-dim ``value``: a DTensor is whole on every rank, a ShardedTensor on one."""
        if self.shape or self.axis.size == 1:
            return self
        if isinstance(value, DTensor):
            return replace(self, chunks=Whole(1, None, self.axis.size), chunk_shape=())
        own_shape = chunk_shape((), self.axis.size, self.axis.rank)
        return replace(self, chunks=chunk_cut((), self.axis.size), chunk_shape=own_shape)

    def dress(self, chunk: torch.Tensor, tensors: ShardedTensors) -> torch.Tensor:
        """torch's type for a tensor of which this rank holds ``chunk``; ``tensors`` are those of the same save."""
        if self.mesh is not None:
            return dtensor(chunk, self.shape, self.mesh, self.placements)
        if self.axis.size == 1:
            return chunk
        return tensors.make(chunk, self.shape, self.axis)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor that is saved or loaded: a parameter or an optimizer's state of it.

    Attributes:
        form: that of the parameter.
        piece: 1-D, this rank's piece: where it is saved from, or loaded to.
    """

    form: ChunkForm
    piece: torch.Tensor


def whole_moves(handle: FlatParamHandle, index: int, rank: int, dst: int | None) -> Moves:
    """How rank ``rank`` of the shard axis takes part in making a slot whole on rank ``dst``, or for None on all."""
    held = handle.layout.pieces(index)
    return moves_between(held, Whole(held.numel, dst, held.size), rank)


def chunk_form(unit: Unit, handle: FlatParamHandle, index: int) -> ChunkForm:
    """The form of slot ``index``.

    Raises:
        UnsupportedError: tensor parallelism has split the parameter over ranks that no mesh joins with the unit's.
    """
    groups = unit.options.groups
    shape = handle.layout.slots[index].shape
    guise = handle.views.params[index].guise
    axis, pieces = groups.shard, handle.layout.pieces(index)
    if isinstance(guise, DTensorGuise):
        return _split_form(unit, handle.layout.slots[index].fqn, shape, guise, pieces)
    assert guise is PLAIN
    mesh: Any = None
    placements: tuple[Placement, ...] = ()
    if groups.mesh is not None and axis.size > 1:
        mesh, dim = _mesh_of(unit)
        if not shape:
            # There is no dimension to be cut along.
            whole = Whole(1, None, axis.size)
            return ChunkForm(unit.options.device, axis, pieces, whole, shape, shape, mesh, _placements(mesh, {}), None)
        placements = _placements(mesh, {dim: Shard(0)})
    chunks, own_shape = chunk_cut(shape, axis.size), chunk_shape(shape, axis.size, axis.rank)
    return ChunkForm(unit.options.device, axis, pieces, chunks, shape, own_shape, mesh, placements, None)


def _mesh_of(unit: Unit) -> tuple[Any, int]:
    """The mesh of DTensors and which of its dims shards: the mesh that the unit's was sliced from, as in FSDP1."""
    mesh = unit.options.groups.mesh
    dim = 1 if unit.options.strategy.is_hybrid else 0
    root = root_mesh(mesh)
    names, all_names = mesh.mesh_dim_names, root.mesh_dim_names
    if root.ndim > mesh.ndim and names and all_names and names[dim] in all_names:
        return root, all_names.index(names[dim])
    return mesh, dim


def _placements(mesh: DeviceMesh, by_dim: dict[int, Placement]) -> tuple[Placement, ...]:
    return tuple(by_dim.get(dim, Replicate()) for dim in range(mesh.ndim))


def _split_form(unit: Unit, name: str, part_shape: tuple[int, ...], guise: DTensorGuise, pieces: Spread) -> ChunkForm:
    axis, whole = unit.options.groups.shard, tuple(guise.shape)
    if axis.size == 1:
        own = Whole(math.prod(part_shape), None, 1)
        return ChunkForm(unit.options.device, axis, pieces, own, whole, part_shape, guise.mesh, guise.placements, None)
    root, shard_dim, split_dim = _joined_mesh(unit, name, guise)
    placement = guise.placements[0]
    placements = _placements(root, {shard_dim: Shard(0), split_dim: placement})
    if not (isinstance(placement, Shard) and placement.dim == 0 and split_dim > shard_dim):
        chunks, own_shape = chunk_cut(part_shape, axis.size), chunk_shape(part_shape, axis.size, axis.rank)
        return ChunkForm(unit.options.device, axis, pieces, chunks, whole, own_shape, root, placements, None)
    # DTensor cuts dim 0 along the shard axis first, tensor parallelism did along its own: rows change ranks on both.
    tensor_axis = Axis.of(guise.mesh.get_group(0))
    width = math.prod(whole[1:])
    part = chunk_rows(whole[0], tensor_axis.size, tensor_axis.rank)
    blocks = [chunk_rows(whole[0], axis.size, rank) for rank in range(axis.size)]
    in_blocks = Runs(tuple(_times(part.intersect(block).shift(-part.start), width) for block in blocks))
    block = blocks[axis.rank]
    parts = [chunk_rows(whole[0], tensor_axis.size, rank) for rank in range(tensor_axis.size)]
    wanted = [chunk_rows(block.numel, tensor_axis.size, rank).shift(block.start) for rank in range(tensor_axis.size)]
    second = _Second(
        tensor_axis,
        Runs(tuple(_times(other.intersect(block), width) for other in parts)),
        Runs(tuple(_times(rows, width) for rows in wanted)),
    )
    own_shape = (wanted[tensor_axis.rank].numel, *whole[1:])
    return ChunkForm(unit.options.device, axis, pieces, in_blocks, whole, own_shape, root, placements, second)


def fitting_chunk(form: ChunkForm, value: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """This rank's chunk of a ShardedTensor or DTensor of the right shape, or what is wrong with it.

    A DTensor on the form's mesh with other placements is redistributed, which every rank of the mesh takes part in.
    """
    rank = form.axis.rank
    if isinstance(value, DTensor) and form.mesh is not None and value.device_mesh == form.mesh:
        if tuple(value.placements) != form.placements:
            value = value.redistribute(form.mesh, form.placements)
    elif form.second is not None:
        return None, f"expected a DTensor on {form.mesh} with placements {form.placements}, got {describe(value)}."
    try:
        chunk = local_chunk(value)
    except OptionError as error:
        return None, f"{error}."
    assert chunk is not None
    if chunk.numel() == math.prod(form.chunk_shape) and (chunk.numel() == 0 or chunk.shape == form.chunk_shape):
        return chunk, ""
    return None, (
        f"rank {rank} of the shard group holds a chunk of shape {tuple(chunk.shape)} in a {describe(value)}; expected "
        f"{form.chunk_shape} at {form.axis.size} ranks. Load checkpoints of another number of ranks through "
        "torch.distributed.checkpoint, which reshards."
    )


def _times(rows: Interval, width: int) -> Interval:
    return Interval(rows.start * width, rows.stop * width)


def _joined_mesh(unit: Unit, name: str, guise: DTensorGuise) -> tuple[Any, int, int]:
    mesh = unit.options.groups.mesh
    if mesh is not None and guise.mesh.ndim == 1:
        root, shard_dim = _mesh_of(unit)
        names, split = root.mesh_dim_names, guise.mesh.mesh_dim_names
        if root_mesh(guise.mesh) == root and names and split and split[0] in names:
            return root, shard_dim, names.index(split[0])
    raise UnsupportedError(
        f"A sharded state dict of unit {unit.name!r} holds {name!r}, a DTensor over {guise.mesh}, for which it needs "
        "one mesh of both axes. Make it by init_device_mesh(device_type, (num_data, num_tensor), "
        'mesh_dim_names=("dp", "tp")) and pass device_mesh=mesh["dp"] to FullyShardedDataParallel and mesh["tp"] to '
        "parallelize_module, or use FULL_STATE_DICT."
    )


def chunks_of(rows: Sequence[Row], *, offload: bool) -> list[torch.Tensor]:
    """This rank's chunks, as torch's types, of tensors of which every rank has its pieces.

    Every rank of the shard axes must call this with the same rows. What moves is at most a shard's worth a rank.

    Args:
        rows: the tensors.
        offload: chunks on the CPU.
    """
    found = []
    on_their_way = _Rows()
    for row in rows:
        form = row.form
        target = row.piece.new_empty(form.chunks[form.axis.rank].numel)
        on_their_way.add(form, form.axis, form.pieces, form.chunks, row.piece, target)
        found.append(target)
    on_their_way.wait()
    for index, row in enumerate(rows):
        second = row.form.second
        if second is not None:
            target = row.piece.new_empty(math.prod(row.form.chunk_shape))
            on_their_way.add(row.form, second.axis, second.held, second.wanted, found[index], target)
            found[index] = target
    on_their_way.wait()
    tensors = ShardedTensors()
    chunks = (chunk.view(row.form.chunk_shape) for row, chunk in zip(rows, found, strict=True))
    dressed = zip(rows, chunks, strict=True)
    return [row.form.dress(chunk.cpu() if offload else chunk, tensors) for row, chunk in dressed]


def write_chunks(rows: Sequence[tuple[Row, torch.Tensor]]) -> None:
    """Write this rank's chunks into every rank's pieces; the inverse of :func:`chunks_of`.

    Every rank of the shard axes must call this with the same rows.

    Args:
        rows: the tensors, each with this rank's chunk.
    """
    on_their_way = _Rows()
    found = []
    for row, chunk in rows:
        source = chunk.detach().reshape(-1).to(dtype=row.piece.dtype, device=row.piece.device)
        second = row.form.second
        if second is not None:
            middle = row.piece.new_empty(row.form.chunks[row.form.axis.rank].numel)
            on_their_way.add(row.form, second.axis, second.wanted, second.held, source, middle)
            source = middle
        found.append(source)
    on_their_way.wait()
    with torch.no_grad():
        for (row, _), source in zip(rows, found, strict=True):
            on_their_way.add(row.form, row.form.axis, row.form.chunks, row.form.pieces, source, row.piece)
        on_their_way.wait()


class _Rows:
    """Rows of one save or load on their way."""

    def __init__(self) -> None:
        self._lanes = Lanes()

    def add(
        self,
        form: ChunkForm,
        axis: Axis,
        held: Spread,
        wanted: Spread,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        moves = moves_between(held, wanted, axis.rank)
        nbytes = math.prod(form.shape) * target.itemsize
        self._lanes.add(axis, form.device, moves, source, target, nbytes=nbytes)

    def wait(self) -> None:
        self._lanes.wait()
