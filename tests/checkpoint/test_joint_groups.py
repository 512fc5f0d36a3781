"""The group of all ranks of a model, which save a checkpoint together, where its meshes contain each other's groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_flat import fully_shard
from fsdp_flat.checkpoint.consensus import SAVING, Consensus
from fsdp_flat.errors import UnsupportedError
from tests.support.experts import Meshes, needs_mesh_infos
from tests.support.models import Moe, MoeBlock


@pytest.fixture(autouse=True, scope="module")
def fake_ranks() -> Iterator[None]:
    """Make this process one of eight ranks, in a group that does not communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def size_of(model: nn.Module) -> int:
    return Consensus.of(model, SAVING).size


@needs_mesh_infos
@pytest.mark.parametrize("num_parallel", [1, 2, 4])
@pytest.mark.parametrize("hybrid", [False, True])
def test_experts_are_on_ranks_of_the_other_parameters(num_parallel: int, hybrid: bool) -> None:
    assert size_of(Meshes.of(8, num_parallel, hybrid=hybrid).shard(Moe(), fully_shard)) == 8


@needs_mesh_infos
def test_experts_are_divided_among_ranks_that_shard_and_that_tensor_parallelism_divides() -> None:
    # The groups of four overlap in two ranks, and neither contains the other.
    dense = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    sparse = init_device_mesh("cpu", (2, 4), mesh_dim_names=("efsdp", "ep"))
    block: Any = MoeBlock()
    block.gate.weight = nn.Parameter(distribute_tensor(block.gate.weight.detach(), dense["tp"], [Shard(0)]))
    block.experts.split(sparse["ep"])
    own, info = set(block.experts.parameters()), _fsdp_common.FSDPMeshInfo(sparse["efsdp"], shard_mesh_dim=0)

    def place(param: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), info) if param in own else None

    assert size_of(fully_shard(block, mesh=dense["fsdp"], shard_placement_fn=place)) == 8


def test_a_group_that_does_not_exist_is_named() -> None:
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    assert size_of(fully_shard(nn.Linear(4, 4), mesh=cube["c"])) == 2
    alone = DeviceMesh("cpu", [[[rank]] for rank in range(8)], mesh_dim_names=("a", "b", "c"))["b", "c"]
    assert size_of(fully_shard(nn.Linear(4, 4), mesh=alone)) == 1
    with pytest.raises(UnsupportedError, match=r"on 4 of 8 ranks, along 2 groups"):
        size_of(fully_shard(nn.Linear(4, 4), mesh=cube["b", "c"]))
    # Two groups of four ranks each, which overlap.
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([4, 5, 6, 7], [0, 1, 4, 5])]
    model = nn.Sequential(*[fully_shard(nn.Linear(4, 4), mesh=mesh) for mesh in meshes])
    with pytest.raises(UnsupportedError, match=r"groups that overlap, of the ranks \[0, 1, 4, 5\] and \[4, 5, 6, 7\]"):
        size_of(model)


def test_dims_of_tensor_parallelism_multiply() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model: Any = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Replicate()]))
    assert size_of(fully_shard(model, mesh=mesh["replicate", "shard"])) == 8
