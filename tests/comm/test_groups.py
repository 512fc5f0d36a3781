"""Groups of a constructor without a mesh: none at all, and those of a node."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.comm import STRATEGIES, ShardingGroups, resolve_groups
from fsdp_flat.errors import OptionError, UsageError
from tests.support import on_ranks

CPU = torch.device("cpu")
HYBRIDS = [STRATEGIES[ShardingStrategy.HYBRID_SHARD], STRATEGIES[ShardingStrategy._HYBRID_SHARD_ZERO2]]


def resolve(strategy: Any, group: Any = None, mesh: Any = None, *, has_policy: bool = False) -> ShardingGroups:
    return resolve_groups(strategy, group, mesh, has_policy=has_policy, device=CPU)


def test_without_a_process_group_the_error_says_how_to_get_one() -> None:
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"init_process_group.*torchrun") as caught:
        FSDP(torch.nn.Linear(2, 2))
    assert isinstance(caught.value, RuntimeError)


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
