"""Configures how the parameters of a group are sharded one by one, and makes their DTensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_flat.core.params import PLAIN, DataParallelDims, ManagedParam, check_adapter
from fsdp_flat.core.torch_core import dtensor_of, outside_fake_mode
from fsdp_flat.errors import ShardingError

_specs: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakValueDictionary[tuple[Any, ...], Any]]
_specs = weakref.WeakKeyDictionary()
"""The specs of existing DTensors, by shard group, then by shape, dim and dtype. To make a spec takes long.

The shard group is the key, and not the mesh, because a mesh may equal an earlier one whose groups are destroyed.
"""


@dataclass(frozen=True, slots=True)
class PerParamSharding:
    """Configures the DTensors of a group.

    Attributes:
        mesh: the data-parallel mesh; its last dim shards, and a dim before it replicates.
        offloads: shards have to be in host memory.
        data_dims: the dims of ``mesh`` in a larger mesh, on which parameters are DTensors before sharding; else None.
        suffix: text after the unit's name, for a mesh that ``shard_placement_fn`` chose; else empty.
        policy: the caller's ``MixedPrecisionPolicy``, an argument of all-gather extensions.
    """

    mesh: DeviceMesh
    offloads: bool = False
    data_dims: DataParallelDims | None = None
    suffix: str = ""
    policy: Any = None

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh that shards."""
        names = self.mesh.mesh_dim_names
        if self.mesh.ndim == 1 or names is None:
            return self.mesh
        with outside_fake_mode():
            return self.mesh[names[-1]]

    def adapted(self, entry: ManagedParam, groups: list[dist.ProcessGroup]) -> ManagedParam:
        """Return a parameter with the adapter by which it is sharded over ``groups``, or raise an OptionError."""
        if self.data_dims is not None:
            return replace(entry, adapter=self.data_dims.adapted(entry.adapter, entry.fqn))
        check_adapter(entry.adapter, entry.fqn, groups)
        return entry

    def dims_of(self, params: Sequence[ManagedParam]) -> list[int]:
        """Return the sharded dim of each parameter, non-negative; raise a ShardingError if one has no such dim."""
        dims = []
        for entry in params:
            dims.append(entry.dim + entry.param.dim() if entry.dim < 0 else entry.dim)
            if not 0 <= dims[-1] < max(1, entry.param.dim()):
                raise ShardingError(
                    f"Parameter {entry.fqn!r} of shape {tuple(entry.shape)} has no dim {entry.dim} to shard; "
                    "shard_placement_fn returned it."
                )
        return dims

    def template(self, entry: ManagedParam, dim: int, local: torch.Tensor) -> DTensor:
        """Create the DTensor of a parameter whose part on this rank is ``local`` (on any device)."""
        key = entry.shape, dim, local.dtype
        known = _specs.setdefault(self.mesh.get_group(self.mesh.ndim - 1), weakref.WeakValueDictionary())
        spec = known.get(key) if entry.adapter is PLAIN else None
        # A mesh with the same shard group may have another replicate group.
        if spec is None or (spec.mesh is not self.mesh and (self.mesh.ndim > 1 or spec.mesh != self.mesh)):
            shape = entry.adapter.full_shape(tuple(entry.shape))
            mesh, placements = entry.adapter.sharded_over(self.mesh, dim)
            stride = torch.empty(shape, device="meta").stride()
            # Other classes of tensors may lack operations that this needs.
            like = local if type(local) is torch.Tensor else torch.empty(local.shape, dtype=local.dtype, device="meta")
            made = DTensor.from_local(like, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
            # DTensors of one shape share one spec object, which DTensor's dispatch finds faster than an equal one. The
            # spec of a detached tensor would have an equal mesh that torch remembers, not this one.
            spec = made._spec
            if entry.adapter is PLAIN:
                known[key] = spec
        return dtensor_of(local, spec)
