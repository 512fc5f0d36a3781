"""Trains with fully_shard beside a plain replica and torch's fully_shard."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import FSDPModule
from tests.composable.sides import average_gradients, blocks_and_root
from tests.support import on_ranks
from tests.support.kit import Stack, square_loss
from tests.support.peer import peer_fully_shard


def steps(model: nn.Module, num_steps: int = 3, *, averaged: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(num_steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = square_loss(model, torch.randn(3, 8))
        loss.backward()
        if averaged:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_training_equals_a_replica_and_torch(reshard_after_forward: bool | None) -> None:
    torch.manual_seed(0)
    plain = Stack()
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
