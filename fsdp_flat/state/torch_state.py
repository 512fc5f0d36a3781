"""Builds and reads torch's sharded tensors without communication, for which torch has private names only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardingSpec, ShardMetadata
from torch.distributed._shard.sharding_spec.api import _infer_sharding_spec_from_shards_metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.distributed.tensor.placement_types import Shard as ShardedDim

from fsdp_flat.comm import RankGroup, global_ranks
from fsdp_flat.core import DTensorPlan
from fsdp_flat.errors import LoadError
from fsdp_flat.layout import chunk_rows, chunk_shape
from fsdp_flat.state.shards import IndexedParam, dtype_of

# By bytes of an element, a dtype that gloo and NCCL send; they lack many integers, and floating-point ones of a byte.
_SENT_AS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def dtensor(
    chunk: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    """Build a DTensor of ``shape`` of which this rank holds ``chunk``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(chunk, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def full_tensor(value: DTensor) -> torch.Tensor:
    """Return the full tensor of a DTensor. Every rank of its mesh must call this.

    ``DTensor.full_tensor`` of torch 2.8 mixes up the rows of a dim that two mesh dims shard, where their numbers differ
    between ranks. Right in 2.11, and this way is right in the versions in between too.
    """
    mesh, placements = value.device_mesh, value.placements
    dtype = value.dtype
    is_sent = dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
    if not is_sent and dtype is not (sent_as := _SENT_AS[dtype.itemsize]):
        sent = dtensor(value.to_local().view(sent_as), tuple(value.shape), mesh, placements)
        assert isinstance(sent, DTensor)
        return full_tensor(sent).view(dtype)
    if torch.__version__ >= "2.11" or not any(isinstance(each, _StridedShard) for each in placements):
        return value.full_tensor()
    assert mesh.mesh_dim_names is not None
    full = value.to_local()
    # A strided dim was sharded after the mesh dims that follow it.
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, ShardedDim):
            shape = list(value.shape)
            for later, other in enumerate(placements[mesh_dim + 1 :], mesh_dim + 1):
                if isinstance(other, ShardedDim):
                    rows = chunk_rows(shape[other.dim], mesh.size(later), mesh.get_local_rank(later))
                    shape[other.dim] = rows.numel
            line = root_mesh(mesh)[mesh.mesh_dim_names[mesh_dim]]
            part = dtensor(full, tuple(shape), line, (ShardedDim(placement.dim),))
            assert isinstance(part, DTensor)
            full = part.full_tensor()
    return full


class ShardedTensors:
    """Builds the ShardedTensors of one save, split into dim-0 chunks over a shard group.

    torch derives and checks the shard metadata of every tensor anew, in time that grows with the number of ranks.
    Here those of one shape, group and device share them. Source of the format: torch FSDP1's sharded state dicts
    (placements ``rank:<global rank>/<device>``; ranks without a chunk have no local shard).
    """

    def __init__(self) -> None:
        self._specs: dict[Any, tuple[dict[int, ShardMetadata], ShardingSpec]] = {}

    def make(self, chunk: torch.Tensor, shape: tuple[int, ...], rank_group: RankGroup) -> torch.Tensor:
        """Build a ShardedTensor of ``shape`` in dim-0 chunks over ``rank_group``; this rank holds ``chunk``."""
        kind = (shape, rank_group, chunk.device)
        if kind not in self._specs:
            shards = _shard_metadata(shape, rank_group, chunk.device)
            self._specs[kind] = shards, _infer_sharding_spec_from_shards_metadata(list(shards.values()))
        shards, spec = self._specs[kind]
        made = ShardedTensor.__new__(
            ShardedTensor,
            spec,
            torch.Size(shape),
            dtype=chunk.dtype,
            layout=chunk.layout,
            pin_memory=chunk.is_pinned(),
            requires_grad=False,
        )
        own = shards.get(rank_group.rank)
        made._local_shards = [] if own is None else [Shard(chunk, replace(own))]
        made._prepare_init(process_group=rank_group.group)
        return made


def _shard_metadata(shape: tuple[int, ...], rank_group: RankGroup, device: torch.device) -> dict[int, ShardMetadata]:
    world_ranks, found = global_ranks(rank_group.process_group), {}
    for rank in range(rank_group.size):
        size = chunk_shape(shape, rank_group.size, rank)
        # A tensor without rows still gets one chunk: torch refuses a ShardedTensor without any.
        if not size or size[0] or (rank == 0 and shape[0] == 0):
            offsets = [chunk_rows(shape[0], rank_group.size, rank).start, *[0] * (len(shape) - 1)] if shape else []
            place = "cpu" if device.type == "cpu" else f"{device.type}:{rank % torch.accelerator.device_count()}"
            found[rank] = ShardMetadata(offsets, list(size), f"rank:{world_ranks[rank]}/{place}")
    return found


def local_chunk(value: Any, label: str) -> torch.Tensor | None:
    """Return this rank's local tensor of a ShardedTensor or DTensor; None for any other value."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        if len(shards) > 1:
            raise LoadError(f"{label}: expected at most one local shard of a ShardedTensor, got {len(shards)}.")
        return shards[0].tensor if shards else torch.empty(0, dtype=dtype_of(value))
    return None


def is_sharded_over(value: ShardedTensor, rank_group: RankGroup) -> bool:
    """Return whether a ShardedTensor is sharded over the ranks of a group."""
    ranks = [] if rank_group.group is None else global_ranks(rank_group.group)
    return list(global_ranks(value._process_group)) == list(ranks)


def root_mesh(mesh: DeviceMesh) -> Any:
    """Return the mesh that ``mesh`` was sliced from, or ``mesh`` itself; torch 2.8 to 2.15 name it differently."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


def local_from(param: IndexedParam, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, as the parameter is sharded; nothing is communicated."""
    return dtensors_of(param).distribute(param.index, full).to_local()


def empty_dtensor(param: IndexedParam, dtype: torch.dtype, device: torch.device) -> DTensor:
    """Create a DTensor with the parameter's mesh and placements."""
    full = torch.empty(param.sharded_param.shape, dtype=dtype, device="meta")
    local = torch.empty_like(local_from(param, full), device=device)
    return dtensors_of(param).with_local(param.index, local)


def dtensor_from(param: IndexedParam, value: Any, label: str) -> DTensor:
    """Return a copy of a value of a state dict as a DTensor with the parameter's mesh and placements.

    The value has the parameter's shape: a DTensor with these, or a full tensor. ``label`` names it in error texts.
    """
    sharded_param = param.sharded_param
    assert isinstance(sharded_param, DTensor)
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) != (sharded_param.device_mesh, sharded_param.placements):
            raise LoadError(
                f"{label} is a DTensor on {value.device_mesh} with placements {value.placements}; the parameter is on "
                f"{sharded_param.device_mesh} with {sharded_param.placements}. Load full tensors, or read the "
                "checkpoint by torch.distributed.checkpoint into the state dict of this optimizer."
            )
        local = value.to_local()
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        local = local_from(param, value)
    else:
        raise LoadError(
            f"{label} is a {type(value).__name__}; a parameter that fully_shard has sharded takes a full tensor or a "
            "DTensor. Save full tensors, or by torch.distributed.checkpoint."
        )
    return dtensors_of(param).with_local(param.index, local.detach().to(param.param_group.spec.shard_device, copy=True))


def distributed_param(param: IndexedParam, full: torch.Tensor, label: str) -> DTensor:
    """Return a copy of the full value of a parameter, in the parameter's class, with its mesh and placements."""
    dtensors = dtensors_of(param)
    made = dtensors.in_class(param.index, full)
    return dtensor_from(param, full, label) if made is full else dtensors.distribute(param.index, made)


def placed_like(param: IndexedParam, full: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a full tensor of another shape than the parameter's as an optimizer keeps it; nothing is communicated.

    That is as ``like``, its present state; without one a DTensor, sharded where the parameter is and has the same size,
    but a tensor of one element is a plain one.
    """
    sharded_param = param.sharded_param
    assert isinstance(sharded_param, DTensor)
    full = full.detach().to(param.param_group.spec.shard_device, copy=True)
    if not isinstance(like, DTensor) and (isinstance(like, torch.Tensor) or full.numel() == 1):
        return full
    is_fitting = isinstance(like, DTensor) and like.shape == full.shape
    mesh, placements = (
        (like.device_mesh, like.placements) if is_fitting else (sharded_param.device_mesh, sharded_param.placements)
    )

    def fits(each: Placement) -> bool:
        # Partial and strided ones are replicated instead, which is the same tensor.
        if not isinstance(each, ShardedDim) or type(each) is not ShardedDim or each.dim >= full.dim():
            return False
        return is_fitting or full.shape[each.dim] == sharded_param.shape[each.dim]

    found = [each if fits(each) else Replicate() for each in placements]
    return distribute_tensor(full, mesh, found, src_data_rank=None)


def dtensors_of(param: IndexedParam) -> DTensorPlan:
    """Return the DTensors of the group of a parameter that is one."""
    dtensors = param.param_group.dtensors
    assert dtensors is not None
    return dtensors
