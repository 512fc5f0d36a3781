"""Every strategy trains as the plain model on the global batch; pain 8: hybrid meshes of any shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import ShardingStrategy
from tests.support import on_ranks
from tests.support.kit import Stack, full_params, mesh, wrapped
from tests.support.steps import Twin


def train_on_mesh(shape: tuple[int, int], strategy: ShardingStrategy, use_orig_params: bool) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params, device_mesh=mesh(*shape))
    for _ in range(2):
        twin.step()
    flat = torch.cat([value.reshape(-1) for value in full_params(twin.model).values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(flat, other) for other in everyone), "every rank has the same parameters, to the bit"


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_hybrid_on_meshes_of_two_ranks_equals_the_reference_on_every_rank(
    shape: tuple[int, int], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    train_on_mesh(shape, strategy, use_orig_params)


@on_ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_hybrid_on_meshes_of_four_ranks_equals_the_reference_on_every_rank(
    shape: tuple[int, int], use_orig_params: bool
) -> None:
    train_on_mesh(shape, ShardingStrategy.HYBRID_SHARD, use_orig_params)


@on_ranks(4)
def test_hybrid_with_two_groups_given_as_a_tuple_equals_the_reference() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair = (groups[rank // 2], groups[2 + rank % 2])
    twin = Twin.of(Stack(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=pair)
    twin.step()
    twin.step()


@on_ranks(4)
def test_hybrid_given_only_a_policy_makes_groups_of_a_node() -> None:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    twin = Twin.of(Stack(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    groups = twin.model._unit.options.groups
    assert (groups.shard.size, groups.replicate.size) == (2, 2)
    twin.step()


@on_ranks(4)
def test_units_of_different_strategies_in_one_tree_train_as_the_reference() -> None:
    module = Stack()

    def by_hand(module: Stack, **kwargs: object) -> object:

        strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
        for index, strategy in enumerate(strategies):
            module.blocks[index] = wrapped(module.blocks[index], sharding_strategy=strategy)
        return wrapped(module)

    twin = Twin.of(module, wrap=by_hand)
    for _ in range(3):
        twin.step()
