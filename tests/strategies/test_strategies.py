"""Every strategy trains as the plain model on the global batch; pain 8: hybrid meshes of any shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import ShardingStrategy
from tests.support import on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside
from tests.support.kit import full_params, mesh
from tests.support.models import Stack


def train_on_mesh(shape: tuple[int, int], strategy: ShardingStrategy, front: str) -> None:
    beside = Beside(Stack(), front, sharding_strategy=strategy, device_mesh=mesh(*shape))
    beside.train(num_steps=2)
    flat = torch.cat([value.reshape(-1) for value in full_params(beside.ours).values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(flat, other) for other in everyone), "every rank has the same parameters, to the bit"


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_hybrid_on_meshes_of_two_ranks_equals_the_reference_on_every_rank(
    shape: tuple[int, int], strategy: ShardingStrategy, front: str
) -> None:
    train_on_mesh(shape, strategy, front)


@on_ranks(4)
def test_units_of_different_strategies_in_one_tree_train_as_the_reference() -> None:
    def by_hand(module: Stack, apply: Callable[..., nn.Module]) -> nn.Module:
        strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
        for index, strategy in enumerate(strategies):
            module.blocks[index] = apply(module.blocks[index], sharding_strategy=strategy)
        return apply(module)

    Beside(Stack(), shard=by_hand).train(num_steps=3)
