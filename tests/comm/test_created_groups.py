"""Groups that the library creates, and barriers of ranks of which one has ended."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard, save_checkpoint
from fsdp_flat.comm import RankGroup, barrier, outliving_group, second_group, subgroup_of
from fsdp_flat.comm.shm import transport_of
from fsdp_flat.comm.shm.connect import Hosts, connect
from fsdp_flat.comm.torch_comm import timeout_of
from fsdp_flat.errors import PeerFailureError
from tests.support import on_ranks
from tests.support.hosts import on_hosts


def summed(group: dist.ProcessGroup | None, rank: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=group)
    return total.item()


@on_ranks(4)
def test_ranks_that_are_in_different_numbers_of_groups_create_groups_of_the_same_ranks(rank: int) -> None:
    dist.new_group([0])
    dist.new_group([0, 2])
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    mine = RankGroup.of(odd if rank % 2 else even)
    expected = 4.0 if rank % 2 else 2.0
    assert summed(second_group(mine).group, rank) == expected
    assert summed(second_group(mine).group, rank) == expected
    assert mine.group is not None
    assert summed(outliving_group(mine.group), rank) == expected
    world = RankGroup.of(dist.group.WORLD)
    assert summed(outliving_group(dist.group.WORLD), rank) == 6.0
    assert summed(subgroup_of(world, 2).group, rank) == (1.0 if rank < 2 else 5.0)


@on_ranks(4)
def test_background_saves_and_resharding_to_fewer_ranks_work_beside_groups_of_single_ranks(
    tmp_path: Path, rank: int
) -> None:
    dist.new_group([0])
    model = FSDP(nn.Linear(4, 4), sync_module_states=True)
    save_checkpoint(tmp_path, model, background=True).wait()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0], reshard_after_forward=2)
    fully_shard(net)
    net(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None for param in net.parameters())


@on_ranks(2)
def test_created_groups_have_the_timeout_of_the_group_that_they_are_made_from(rank: int) -> None:
    parent = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    assert parent is not None
    group = RankGroup.of(parent)
    for created in (second_group(group).group, subgroup_of(group, 2).group):
        assert created is not None
        assert timeout_of(created) == timedelta(seconds=77)


@on_ranks(2)
def test_a_barrier_raises_soon_after_a_rank_has_ended(rank: int) -> None:
    group = RankGroup.of(dist.new_group([0, 1]))
    transport = transport_of(group)
    assert transport is not None
    if rank == 1:
        transport.leave()  # as the end of the process does
        return
    with pytest.raises(
        PeerFailureError, match=r"saving was called on rank 0 .* rank 1 has not called it but has ended"
    ):
        barrier("saving", group)


@on_ranks(4)
def test_a_barrier_over_hosts_raises_soon_where_a_rank_of_the_same_host_has_ended(rank: int) -> None:
    with on_hosts("aabb"):
        group = RankGroup.of(dist.new_group())
        hosts = connect(group)
        assert isinstance(hosts, Hosts)
        if rank == 3:
            hosts.direct.leave()  # as the end of the process does
        elif rank == 2:
            with pytest.raises(PeerFailureError, match=r"called on rank 2 .* rank 3 has not called it but has ended"):
                barrier("saving", group)
