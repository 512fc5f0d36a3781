"""Collects the private names of torch's FSDPs that views of our units return, each with its reason.

They are imported when they are first needed: a program that compares with them has imported them before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fsdp_flat.core import MemoryState, Phase, Site

# Programs compare the state of a parameter group with members of torch's enum.
_STATES = {Phase.IDLE: "IDLE", Phase.SUMMONED: "IDLE", Phase.FORWARD: "FORWARD", Phase.BACKWARD: "PRE_BACKWARD"}

# And the state of its memory. A unit that a backward has kept unsharded for the next forward is UNSHARDED in torch.
_SHARDED_STATES = {
    MemoryState.UNSHARDED: "UNSHARDED",
    MemoryState.RETAINED_POST_BACKWARD: "UNSHARDED",
    MemoryState.SHARDED_POST_FORWARD: "SHARDED_POST_FORWARD",
}


def training_state(phase: Phase) -> Any:
    """Return the member of FSDP2's ``TrainingState`` for what a unit is doing."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    return TrainingState[_STATES[phase]]


def sharded_state(state: MemoryState) -> Any:
    """Return the member of FSDP2's ``ShardedState`` for what a unit's buffers hold."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    return ShardedState[_SHARDED_STATES.get(state, "SHARDED")]


def module_info(sites: Sequence[Site]) -> Any:
    """Return FSDP2's description of where modules hold a parameter."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo

    first, *shared = sites
    return ParamModuleInfo(first.module, first.name, [site.module for site in shared], [site.name for site in shared])


def mesh_info(mesh: DeviceMesh) -> Any:
    """Return FSDP2's description of a mesh, by which ``shard_placement_fn`` chooses it for other parameters."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
