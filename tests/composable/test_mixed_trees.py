"""Trees with units of both kinds, as while a code base moves from the wrapper to fully_shard."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard
from tests.composable.test_training import steps
from tests.support import on_ranks
from tests.support.kit import Stack


def wrapper_outside(model: Stack) -> nn.Module:
    fully_shard(model.blocks[0])
    for index in (1, 2):
        model.blocks[index] = FSDP(model.blocks[index], use_orig_params=True)
    return FSDP(model, use_orig_params=True)


def fully_shard_outside(model: Stack) -> nn.Module:
    model.blocks[0] = FSDP(model.blocks[0], use_orig_params=True)
    for block in model.blocks[1:]:
        fully_shard(block)
    return fully_shard(model)


@on_ranks(2, 4)
@pytest.mark.parametrize("shard", [wrapper_outside, fully_shard_outside])
def test_a_tree_with_units_of_both_kinds_trains_as_a_replica(shard) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    plain = Stack()
    model = shard(copy.deepcopy(plain))
    kinds = {isinstance(param, DTensor) for param in model.parameters()}
    assert kinds == {True, False}
    torch.testing.assert_close(torch.tensor(steps(model)), torch.tensor(steps(plain, averaged=True)))
