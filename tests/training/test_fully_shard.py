"""Trains with fully_shard beside a plain replica and torch's fully_shard."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import FSDPModule
from tests.support import on_ranks
from tests.support.fully_shard_sides import average_gradients, blocks_and_root
from tests.support.kit import normal, seeded, train_on
from tests.support.peer import peer_fully_shard


def steps(model: nn.Module, num_steps: int = 3, *, averaged: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    inputs = [normal(100 * step + dist.get_rank(), 3, 8) for step in range(num_steps)]
    average = functools.partial(average_gradients, model) if averaged else lambda: None
    return [loss.item() for loss in train_on(model, optimizer, inputs, before_step=average)]


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_training_equals_a_replica_and_torch(reshard_after_forward: bool | None) -> None:
    plain = seeded()
    reference, model = copy.deepcopy(plain), copy.deepcopy(plain)
    blocks_and_root(model, reshard_after_forward=reshard_after_forward)
    blocks_and_root(reference, peer_fully_shard, reshard_after_forward=reshard_after_forward)
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPStack"
    expected = steps(plain, averaged=True)
    torch.testing.assert_close(torch.tensor(steps(model)), torch.tensor(expected))
    steps(reference)
    for (name, value), (_, full), (_, other) in zip(
        model.named_parameters(), plain.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert isinstance(value, DTensor), name
        assert value.placements == other.placements
        assert value.to_local().shape == other.to_local().shape
        torch.testing.assert_close(value.full_tensor(), full)
        torch.testing.assert_close(value.full_tensor(), other.full_tensor())
