"""Converts between the tensors that modules hold and the plain local tensors that are flattened.

Flat layouts, shards, buffers and gradients use plain tensors of one process. A parameter that tensor parallelism has
already sharded is a DTensor in its module; its adapter converts between the two. Plain parameters share one adapter,
the identity, which no step calls.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.flat._torch import concatenated_mesh, strided_shard
from fsdp_flat.layout import Interval, chunk_rows


class TensorAdapter:
    """Converts between a module's tensor and the local tensor; this base class, for plain tensors, is the identity."""

    __slots__ = ()

    def from_local(self, local: torch.Tensor) -> torch.Tensor:
        """Return the module's tensor, sharing the memory of ``local`` (the full local tensor, not an FSDP shard)."""
        return local

    def to_local(self, shown: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a module's tensor or of its gradient.

        A gradient may need communication among :attr:`groups` to get the parameter's placements.
        """
        return shown

    def full_tensor(self, shown: torch.Tensor) -> torch.Tensor:
        """Return the full plain tensor of a module's tensor. Every rank of the adapter's mesh must call this."""
        return shown

    def local_slice(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the local part of a full tensor or of a module's tensor; plain ones need no communication."""
        return whole

    def full_shape(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return local_shape

    def offsets(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the offset of the local tensor in the full tensor, per dim."""
        return (0,) * len(local_shape)

    def sharded_over(self, mesh: DeviceMesh, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh and the placements of the tensor once its local part is sharded too.

        Args:
            mesh: the data-parallel mesh; its last dim shards, another one replicates.
            dim: the dim of the tensor that is sharded.
        """
        return mesh, (*[Replicate()] * (mesh.ndim - 1), Shard(dim))

    @property
    def is_first_of_mesh(self) -> bool:
        """Return whether this process writes the full tensor, which others of its mesh compute or hold too."""
        return True

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which the tensor is sharded, besides the unit's shard group."""
        return ()

    @property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All of :attr:`groups`, and the groups over which the tensor is replicated."""
        return ()


PLAIN = TensorAdapter()


class DTensorAdapter(TensorAdapter):
    """Converts between a DTensor and its local tensor.

    Args:
        shape: global shape of the DTensor.
        mesh: its mesh, 1-D or more.
        placements: one per mesh dim, ``Shard`` or ``Replicate``.
    """

    __slots__ = ("mesh", "placements", "shape")

    def __init__(self, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        self.shape = shape
        self.mesh = mesh
        self.placements = placements

    def from_local(self, local: torch.Tensor) -> torch.Tensor:
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    def to_local(self, shown: torch.Tensor) -> torch.Tensor:
        if not isinstance(shown, DTensor):
            return shown
        if shown.placements != self.placements or shown.device_mesh != self.mesh:
            shown = shown.redistribute(self.mesh, self.placements)
        return shown.to_local()

    def full_tensor(self, shown: torch.Tensor) -> torch.Tensor:
        return shown.full_tensor() if isinstance(shown, DTensor) else shown

    def local_slice(self, whole: torch.Tensor) -> torch.Tensor:
        if isinstance(whole, DTensor):
            return self.to_local(whole)
        for dim, run in enumerate(self._own()):
            whole = whole.narrow(dim, run.start, run.numel)
        return whole

    def _own(self) -> list[Interval]:
        """Return the local tensor's interval, per dim."""
        own = [Interval(0, length) for length in self.shape]
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                # DTensor shards like torch.chunk, so the last ranks may have fewer rows or none.
                run = own[placement.dim]
                rows = chunk_rows(run.numel, self.mesh.size(mesh_dim), self.mesh.get_local_rank(mesh_dim))
                own[placement.dim] = rows.shift(run.start)
        return own

    def offsets(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(run.start for run in self._own())

    def sharded_over(self, mesh: DeviceMesh, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        # Tensor parallelism has sharded the tensor already; each of its parts is sharded here again.
        own = (*[Replicate()] * (mesh.ndim - 1), self._sharded_again(dim, 0))
        return concatenated_mesh(mesh, self.mesh), (*own, *self.placements)

    def _sharded_again(self, dim: int, first: int) -> Placement:
        """Return the placement that shards the parts of ``dim`` into which mesh dims from ``first`` on split it."""
        sizes = [
            self.mesh.size(mesh_dim)
            for mesh_dim, placement in enumerate(self.placements)
            if mesh_dim >= first and isinstance(placement, Shard) and placement.dim == dim
        ]
        return strided_shard(dim, math.prod(sizes)) if math.prod(sizes) > 1 else Shard(dim)

    @property
    def is_first_of_mesh(self) -> bool:
        return not any(self.mesh.get_coordinate() or ())

    @property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(self.mesh.get_group(dim) for dim in range(self.mesh.ndim))

    def full_shape(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.shape)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(
            self.mesh.get_group(dim) for dim, place in enumerate(self.placements) if not isinstance(place, Replicate)
        )


@dataclass(frozen=True, slots=True)
class DataParallelDims:
    """Names the dims of a larger mesh over which a unit shards and replicates parameters that are DTensors on it.

    Attributes:
        mesh: the mesh, with names of its dims.
        shard: dims to shard over, flattened into one if there are several.
        replicate: dims to replicate over, likewise.
    """

    mesh: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def index(self, name: str) -> int:
        """Return the position of a dim in the mesh."""
        return (self.mesh.mesh_dim_names or ()).index(name)

    def adapted(self, adapter: TensorAdapter, name: str) -> TensorAdapter:
        """Return the adapter of a parameter that shards it over these dims.

        Raises:
            OptionError: the parameter is no DTensor over the mesh, or not replicated over these dims.
        """
        if not isinstance(adapter, DTensorAdapter) or adapter.mesh != self.mesh:
            held = f"a DTensor over {adapter.mesh}" if isinstance(adapter, DTensorAdapter) else "a plain tensor"
            raise OptionError(
                f"Parameter {name!r} is {held}; with dp_mesh_dims every parameter must be a DTensor over the mesh "
                f"passed, {self.mesh}. Distribute it by torch.distributed.tensor.distribute_module."
            )
        for each in (*self.shard, *self.replicate):
            if not isinstance(adapter.placements[self.index(each)], Replicate):
                raise OptionError(
                    f"Parameter {name!r} has the placements {adapter.placements}, which are not Replicate() on the "
                    f"data-parallel dim {each!r} of {self.mesh}."
                )
        return _WholeMeshAdapter(adapter, self)


class _WholeMeshAdapter(DTensorAdapter):
    """Converts a DTensor whose mesh has the data-parallel dims too.

    Gradients stay unreduced over those, as the unit reduces them.
    """

    __slots__ = ("_data_dims",)

    def __init__(self, adapter: DTensorAdapter, data_dims: DataParallelDims) -> None:
        super().__init__(adapter.shape, adapter.mesh, adapter.placements)
        self._data_dims = data_dims

    def to_local(self, shown: torch.Tensor) -> torch.Tensor:
        if not isinstance(shown, DTensor):
            return shown
        wanted = list(self.placements)
        for name in (*self._data_dims.shard, *self._data_dims.replicate):
            index = self._data_dims.index(name)
            wanted[index] = shown.placements[index]
        if tuple(wanted) != tuple(shown.placements):
            shown = shown.redistribute(self.mesh, wanted)
        return shown.to_local()

    def sharded_over(self, mesh: DeviceMesh, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        shard, replicate = self._data_dims.shard, self._data_dims.replicate
        placements = list(self.placements)
        for name in shard:
            index = self._data_dims.index(name)
            placements[index] = self._sharded_again(dim, index + 1)
        if len(shard) <= 1:
            return self.mesh, tuple(placements)
        # The data-parallel mesh, in which the dims are one, takes the place of the first of them.
        meshes, found = [], []
        for name, placement in zip(self.mesh.mesh_dim_names or (), placements, strict=True):
            if name == shard[0]:
                meshes.append(mesh)
                found += [*[Replicate()] * (mesh.ndim - 1), placement]
            elif name not in (*shard, *replicate):
                meshes.append(self.mesh[name])
                found.append(placement)
        return functools.reduce(concatenated_mesh, meshes), tuple(found)

    @property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        data = {self._data_dims.index(name) for name in (*self._data_dims.shard, *self._data_dims.replicate)}
        return tuple(self.mesh.get_group(dim) for dim in range(self.mesh.ndim) if dim not in data)


def adapter_of(tensor: torch.Tensor, name: str) -> TensorAdapter:
    """Return the adapter of a module's parameter.

    Raises:
        UnsupportedError: if it is neither a plain tensor nor a DTensor of shards and replicas; ``name`` is in the text.
    """
    data = tensor.data
    if type(data) is torch.Tensor:
        return PLAIN
    if not isinstance(data, DTensor):
        raise UnsupportedError(
            f"Parameter {name!r} is a {type(data).__name__}; plain tensors and DTensors can be flattened. Leave it out "
            "with ignored_states."
        )
    if not all(type(placement) in (Shard, Replicate) for placement in data.placements):
        raise UnsupportedError(
            f"Parameter {name!r} is a DTensor with placements {data.placements}; expected Shard and Replicate only. "
            "Redistribute it before wrapping, or leave it out with ignored_states."
        )
    return adapter_if_dtensor(tensor)


def adapter_if_dtensor(tensor: torch.Tensor) -> TensorAdapter:
    """Return a DTensor's adapter, or the plain adapter for any other tensor, also one that cannot be flattened."""
    data = tensor.data
    if not isinstance(data, DTensor):
        return PLAIN
    return DTensorAdapter(data.shape, data.device_mesh, tuple(data.placements))


def check_adapter(adapter: TensorAdapter, name: str, groups: list[dist.ProcessGroup]) -> None:
    """Check that a unit does not shard or replicate a DTensor over ranks of the DTensor's own mesh.

    Args:
        adapter: the adapter of a parameter.
        name: the parameter's FQN, for the error text.
        groups: the groups over which the unit shards and replicates.

    Raises:
        OptionError: if the DTensor's mesh and a group share ranks besides this one.
    """
    if not isinstance(adapter, DTensorAdapter):
        return
    own = dist.get_rank()
    meshed = set(adapter.mesh.mesh.flatten().tolist())
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        if meshed.intersection(ranks) - {own}:
            raise OptionError(
                f"Parameter {name!r} is a DTensor over ranks {sorted(meshed)} and would be sharded over ranks {ranks} "
                f"too; the two may share rank {own} only. Make one mesh with a group for each, "
                'mesh = init_device_mesh(device_type, (num_data, num_tensor), mesh_dim_names=("dp", "tp")), pass '
                'mesh["tp"] to parallelize_module and device_mesh=mesh["dp"] to FullyShardedDataParallel.'
            )
