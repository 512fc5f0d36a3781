"""The constructor's ``process_group`` and ``device_mesh`` become two groups, or a clear error."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.comm import STRATEGIES, ShardingGroups, resolve_groups, strategy_from
from fsdp_flat.errors import OptionError, OptionTypeError, UsageError
from tests.support import on_ranks

CPU = torch.device("cpu")
FULL = STRATEGIES[ShardingStrategy.FULL_SHARD]
NONE = STRATEGIES[ShardingStrategy.NO_SHARD]
HYBRIDS = [STRATEGIES[ShardingStrategy.HYBRID_SHARD], STRATEGIES[ShardingStrategy._HYBRID_SHARD_ZERO2]]


def resolve(strategy: Any, group: Any = None, mesh: Any = None, *, has_policy: bool = False) -> ShardingGroups:
    return resolve_groups(strategy, group, mesh, has_policy=has_policy, device=CPU)


def test_without_a_process_group_the_error_says_how_to_get_one() -> None:
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"init_process_group.*torchrun") as caught:
        FSDP(torch.nn.Linear(2, 2))
    assert isinstance(caught.value, RuntimeError)


@on_ranks(2)
def test_a_process_group_and_a_mesh_together_are_refused() -> None:
    """CONTRACT (c), _init_utils.py 99."""
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(OptionError, match="process_group and device_mesh were both given") as caught:
        FSDP(torch.nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh)
    assert isinstance(caught.value, ValueError)


@on_ranks(2)
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_a_hybrid_strategy_by_hand_needs_its_groups(strategy: Any) -> None:
    """CONTRACT (c), _init_utils.py 109."""
    with pytest.raises(OptionError, match=r"without an auto_wrap_policy needs its groups.*2-D device_mesh") as caught:
        FSDP(torch.nn.Linear(2, 2), sharding_strategy=strategy.member)
    assert isinstance(caught.value, ValueError)
    assert strategy.member.name in str(caught.value)


@on_ranks(2)
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_a_hybrid_strategy_needs_a_mesh_of_two_dimensions(strategy: Any) -> None:
    """CONTRACT (c), _init_utils.py 156."""
    for shape in ((2,), (1, 1, 2)):
        mesh = init_device_mesh("cpu", shape)
        with pytest.raises(OptionError, match=rf"2-D device_mesh.*got a {len(shape)}-D mesh") as caught:
            FSDP(torch.nn.Linear(2, 2), sharding_strategy=strategy.member, device_mesh=mesh)
        assert isinstance(caught.value, ValueError)


@on_ranks(2)
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_a_hybrid_strategy_takes_two_groups_and_nothing_else(strategy: Any) -> None:
    """CONTRACT (c), _init_utils.py 175."""
    world = dist.group.WORLD
    for given in (world, (world,), (world, world, world), [world, world], (world, "nodes"), 3):
        with pytest.raises(OptionError, match=r"tuple \(shard_group, replicate_group\)") as caught:
            FSDP(torch.nn.Linear(2, 2), sharding_strategy=strategy.member, process_group=given)
        assert isinstance(caught.value, ValueError)


@on_ranks(2)
def test_things_that_are_no_group_or_no_mesh_are_refused_by_type() -> None:
    with pytest.raises(OptionTypeError, match="got tuple"):
        resolve(FULL, (dist.group.WORLD, dist.group.WORLD))
    with pytest.raises(OptionTypeError, match="DeviceMesh; got str"):
        resolve(FULL, mesh="cpu")


@on_ranks(4)
def test_each_strategy_splits_over_the_axis_that_its_row_says(rank: int) -> None:
    groups = resolve(FULL)
    assert (groups.shard.size, groups.shard.rank, groups.replicate.size) == (4, rank, 1)
    groups = resolve(NONE)
    assert (groups.shard.size, groups.replicate.size, groups.replicate.rank) == (1, 4, rank)
    mesh = init_device_mesh("cpu", (2, 2))
    groups = resolve(HYBRIDS[0], mesh=mesh)
    assert (groups.shard.rank, groups.replicate.rank) == (rank % 2, rank // 2)
    assert groups.num_ranks == 4
    assert groups.mesh is mesh
    groups = resolve(FULL, mesh=init_device_mesh("cpu", (4,)))
    assert (groups.shard.size, groups.shard.rank) == (4, rank)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = resolve(HYBRIDS[0], (pair[rank // 2], pair[2 + rank % 2]))
    assert (groups.shard.rank, groups.replicate.rank) == (rank % 2, rank // 2)


@on_ranks(4)
def test_a_hybrid_strategy_with_a_policy_shards_within_what_the_launcher_calls_a_node(rank: int) -> None:
    for local in (1, 2, 4):
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        groups = resolve(HYBRIDS[0], has_policy=True)
        assert (groups.shard.size, groups.replicate.size) == (local, 4 // local)
        assert (groups.shard.rank, groups.replicate.rank) == (rank % local, rank // local)
        assert dist.get_process_group_ranks(groups.shard.group) == list(
            range(rank // local * local, rank // local * local + local)
        )
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(OptionError, match="nodes of 3 do not divide 4 ranks"):
        resolve(HYBRIDS[0], has_policy=True)


def test_a_strategy_is_taken_by_its_member_or_by_name_of_a_foreign_enum() -> None:
    from torch.distributed.fsdp import ShardingStrategy as PeerStrategy

    assert strategy_from(None) is FULL
    for member in PeerStrategy:
        assert strategy_from(member).member.name == member.name
    with pytest.raises(OptionError, match=r"ShardingStrategy\.FULL_SHARD, .*got 'full' of type str"):
        strategy_from("full")
