"""Describes the parameters that a unit manages: where modules hold them, and how DTensors become plain tensors.

Layouts, shards, buffers and gradients use plain tensors. A parameter that tensor parallelism has sharded is a DTensor
in its module; its adapter converts between the two. Plain parameters share the identity, which no step calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import TensorWeakRef

from fsdp_flat.core.torch_core import (
    attributes_of,
    concatenated_mesh,
    has_values,
    local_of,
    outside_fake_mode,
    strided_shard,
)
from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError
from fsdp_flat.layout import Interval, chunk_rows

# -- adapters ----------------------------------------------------------------------------------------------------------


class TensorAdapter:
    """Converts between a module's tensor and the local tensor; this base class, for plain tensors, is the identity."""

    __slots__ = ()

    def from_local(self, local: torch.Tensor) -> torch.Tensor:
        """Return the module's tensor, sharing the memory of ``local`` (the full local tensor, not an FSDP shard)."""
        return local

    def to_local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a module's tensor or of its gradient.

        A gradient may need communication among :attr:`groups` to get the parameter's placements.
        """
        return tensor

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full plain tensor of a module's tensor. Every rank of the adapter's mesh must call this."""
        return tensor

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
        """Return the mesh and the placements of the tensor once its local part is sharded along ``dim`` too.

        The last dim of the data-parallel ``mesh`` shards, another one replicates.
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

    @property
    def names(self) -> tuple[str, ...]:
        """Return all of these dims."""
        return (*self.shard, *self.replicate)

    def index(self, name: str) -> int:
        """Return the position of a dim in the mesh."""
        return (self.mesh.mesh_dim_names or ()).index(name)

    def adapted(self, adapter: TensorAdapter, name: str) -> TensorAdapter:
        """Return the adapter that shards a DTensor over these dims of its mesh; raise an OptionError for others."""
        if not isinstance(adapter, DTensorAdapter) or adapter.mesh != self.mesh:
            held = f"a DTensor over {adapter.mesh}" if isinstance(adapter, DTensorAdapter) else "a plain tensor"
            raise OptionError(
                f"Parameter {name!r} is {held}; with dp_mesh_dims every parameter must be a DTensor over the mesh "
                f"passed, {self.mesh}. Distribute it by torch.distributed.tensor.distribute_module."
            )
        for each in self.names:
            if not isinstance(adapter.placements[self.index(each)], Replicate):
                raise OptionError(
                    f"Parameter {name!r} has the placements {adapter.placements}, which are not Replicate() on the "
                    f"data-parallel dim {each!r} of {self.mesh}."
                )
        return replace(adapter, data_dims=self)


@dataclass(frozen=True, slots=True, eq=False)
class DTensorAdapter(TensorAdapter):
    """Converts between a DTensor, all of whose placements are ``Shard`` or ``Replicate``, and its local tensor.

    Gradients stay unreduced over ``data_dims``, the dims of its mesh over which a unit shards and replicates it.
    """

    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    data_dims: DataParallelDims | None = None

    def from_local(self, local: torch.Tensor) -> torch.Tensor:
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    def to_local(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        wanted = self.placements
        if self.data_dims is not None:
            data = self._data
            wanted = tuple(tensor.placements[dim] if dim in data else own for dim, own in enumerate(wanted))
        if wanted != tensor.placements or tensor.device_mesh != self.mesh:
            tensor = tensor.redistribute(self.mesh, wanted)
        return tensor.to_local()

    @property
    def _data(self) -> set[int]:
        """The data-parallel dims of its mesh."""
        return set() if self.data_dims is None else set(map(self.data_dims.index, self.data_dims.names))

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

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
        if self.data_dims is None:
            own = (*[Replicate()] * (mesh.ndim - 1), self._sharded_again(dim, 0))
            with outside_fake_mode():
                return concatenated_mesh(mesh, self.mesh), (*own, *self.placements)
        shard, replicate = self.data_dims.shard, self.data_dims.replicate
        placements = list(self.placements)
        for index in map(self.data_dims.index, shard):
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
                with outside_fake_mode():
                    meshes.append(self.mesh[name])
                found.append(placement)
        with outside_fake_mode():
            return functools.reduce(concatenated_mesh, meshes), tuple(found)

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
        return tuple(self.mesh.get_group(dim) for dim in range(self.mesh.ndim) if dim not in self._data)

    def full_shape(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.shape)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(
            self.mesh.get_group(dim) for dim, place in enumerate(self.placements) if not isinstance(place, Replicate)
        )


def adapter_of(tensor: torch.Tensor, name: str, *, takes_subclasses: bool = False) -> TensorAdapter:
    """Return the adapter of the parameter ``name``.

    Raises:
        UnsupportedError: it is neither a plain tensor nor a DTensor of shards and replicas. With ``takes_subclasses``
            both may be of other classes of tensors.
    """
    data = tensor.data
    if not has_values(data):
        return PLAIN
    local = local_of(data)
    if is_subclass(local) and not takes_subclasses:
        raise UnsupportedError(
            f"Parameter {name!r} is a {type(local).__name__}; plain tensors and DTensors of them can be flattened. "
            "Wrap the module that holds it, and no plain parameter, as a unit of its own, or call fully_shard on it: "
            "both call fsdp_pre_all_gather and fsdp_post_all_gather of such classes. Or leave it out with "
            "ignored_states."
        )
    if isinstance(data, DTensor) and not all(type(placement) in (Shard, Replicate) for placement in data.placements):
        raise UnsupportedError(
            f"Parameter {name!r} is a DTensor with placements {data.placements}; expected Shard and Replicate only. "
            "Redistribute it before wrapping, or leave it out with ignored_states."
        )
    return adapter_if_dtensor(tensor)


def is_subclass(local: torch.Tensor) -> bool:
    """Return whether a tensor, the data of a parameter and no DTensor, is of a class of its own: quantized, perhaps."""
    return type(local) is not torch.Tensor and has_values(local)


def adapter_if_dtensor(tensor: torch.Tensor) -> TensorAdapter:
    """Return a DTensor's adapter, or the plain adapter for any other tensor, also one that cannot be flattened."""
    data = tensor.data
    if not isinstance(data, DTensor):
        return PLAIN
    return DTensorAdapter(data.shape, data.device_mesh, tuple(data.placements))


def check_adapter(adapter: TensorAdapter, name: str, groups: list[dist.ProcessGroup]) -> None:
    """Raise an OptionError if a DTensor's own mesh and one of a unit's ``groups`` share ranks besides this one."""
    if not isinstance(adapter, DTensorAdapter):
        return
    own = dist.get_rank()
    with outside_fake_mode():
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


# -- managed parameters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Locates one registration of a parameter: ``module._parameters[name]``."""

    module: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True, slots=True)
class FlattenedBy:
    """Identifies the unit that flattened a parameter: the value of its ``_fsdp_flat_owner``.

    Attributes:
        fqn: FQN of the parameter relative to the unit's module.
        shape: unsharded shape.
        is_replaced: the marked tensor is a caller's old Parameter, which a unit has replaced by another one.
    """

    fqn: str
    unit_name: str
    shape: tuple[int, ...]
    is_replaced: bool = False

    def __reduce__(self) -> Any:
        # A pickled or copied parameter belongs to no unit: its mark is false, of a class that torch.load accepts.
        return set, ()

    def describe(self) -> str:
        """Return FQN, shape and unit, for error texts."""
        return f"{self.fqn!r} {tuple(self.shape)} of unit {self.unit_name!r}"


def is_managed(param: torch.Tensor) -> bool:
    """Return whether a unit has flattened a parameter, or it is a unit's flat parameter."""
    return bool(getattr(param, "_fsdp_flat_owner", False))


def owner_of(param: torch.Tensor) -> FlattenedBy | None:
    """Return the unit that has flattened a parameter; None for a flat parameter, and for any other tensor."""
    owner = getattr(param, "_fsdp_flat_owner", None)
    return owner if isinstance(owner, FlattenedBy) else None


def unsharded_shape(param: torch.Tensor) -> torch.Size | None:
    """Return the unsharded shape of a unit's parameter; None for any other tensor."""
    owner = owner_of(param)
    return None if owner is None else torch.Size(owner.shape)


@dataclass(frozen=True, slots=True, eq=False)
class ManagedParam:
    """Lists all sites of a parameter in its unit; the first site gives its FQN.

    Attributes:
        param: the parameter, a plain one once the unit manages it.
        sites: its registrations.
        adapter: converts between ``param`` and the tensor that the sites show.
        replaced: returns the user's Parameter if ``param`` replaces it.
        dim: the dim along which a row layout shards it; may be negative.
        kind: the class of the user's Parameter, or ``nn.Parameter`` for that of a DTensor.
    """

    param: nn.Parameter
    sites: tuple[Site, ...]
    adapter: TensorAdapter = PLAIN
    replaced: Callable[[], nn.Parameter | None] | None = None
    dim: int = 0
    kind: type[nn.Parameter] = nn.Parameter

    @property
    def fqn(self) -> str:
        """FQN relative to the unit's module, without wrapper components."""
        return self.sites[0].fqn

    @property
    def original(self) -> nn.Parameter:
        """The user's Parameter, or one like it if the user does not hold it any more."""
        found = self.replaced() if self.replaced is not None else self.param
        return nn.Parameter(self.adapter.from_local(self.param.detach()), False) if found is None else found

    def replaced_by(self, param: nn.Parameter) -> ManagedParam:
        """Return the entry of a parameter that replaces this one, of which a weak reference is kept."""
        return replace(self, param=param, replaced=self.replaced or TensorWeakRef(self.param))

    def unsharded(self, local: torch.Tensor, *, requires_grad: bool = False) -> nn.Parameter:
        """Return a Parameter of the user's class, with its attributes, whose local tensor is ``local``, unsharded.

        Modules and libraries look at both: flags for weight decay, the constants of a quantized parameter.
        """
        tensor = self.adapter.from_local(local)
        param = nn.Parameter(tensor, requires_grad)
        if self.kind is not nn.Parameter:
            param = torch.Tensor._make_subclass(self.kind, tensor, requires_grad)
        param.__dict__.update(attributes_of(self.param))
        return param

    def mark(self, owner: FlattenedBy) -> None:
        """Mark the parameter as flattened by a unit, and the one that it replaces."""
        replaced = self.replaced() if self.replaced is not None else None
        # FSDP1's mark is a plain True. A pickled parameter keeps it, and not the owner.
        self.param.__dict__.update(_fsdp_flat_owner=owner, _fsdp_flattened=True)
        if replaced is not None:
            gone = FlattenedBy(owner.fqn, owner.unit_name, owner.shape, is_replaced=True)
            replaced.__dict__.update(_fsdp_flat_owner=gone, _fsdp_flattened=True)

    @property
    def shape(self) -> torch.Size:
        """Unsharded shape, unless the parameter is a local shard."""
        return self.param.shape


# -- the walk over modules ---------------------------------------------------------------------------------------------


def check_module(value: object) -> None:
    """Raise an OptionTypeError if a caller's ``value`` is no module."""
    if not isinstance(value, nn.Module):
        raise OptionTypeError(f"This call takes a model, an nn.Module; got {type(value).__name__}.")


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """Iterate over ``root.modules()``, without a generator per level of nesting."""
    check_module(root)
    seen: set[nn.Module] = set()
    ahead = [root]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            yield module
            ahead.extend(child for child in reversed(module._modules.values()) if child is not None)
