"""Converts between the tensors that modules hold and the plain local tensors that are flattened.

Flat layouts, shards, buffers and gradients use plain tensors of one process. A parameter that tensor parallelism has
already sharded is a DTensor in its module; its adapter converts between the two. Plain parameters share one adapter,
the identity, which no step calls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.layout import Interval, chunk_rows

__all__ = ["PLAIN", "DTensorAdapter", "TensorAdapter", "adapter_if_dtensor", "adapter_of", "check_adapter"]


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
