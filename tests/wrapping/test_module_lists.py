"""Several modules as one unit: the first to run unshards, the last reshards, and backward goes the other way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import fully_shard, participate
from tests.support import on_ranks
from tests.support.fully_shard_beside import grads_of
from tests.support.fully_shard_sides import average_gradients
from tests.support.kit import batch, seeded, square_loss
from tests.support.peer import peer_fully_shard
from tests.training.test_fully_shard import steps


class Tail(nn.Module):
    """A body, and two modules that run one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).relu())


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_two_modules_in_one_unit_train_as_a_replica_and_torch(reshard_after_forward: bool) -> None:
    torch.manual_seed(0)
    plain = Tail()
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model, shard in zip(models, (fully_shard, peer_fully_shard), strict=True):
        shard(model.body)
        shard([model.norm, model.head], reshard_after_forward=reshard_after_forward)
        shard(model)
    expected = steps(plain, averaged=True)
    assert len(set(expected)) == len(expected)
    for model in models:
        torch.testing.assert_close(steps(model), expected)
        for (name, value), full in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(value.full_tensor(), full, msg=name)


class Branching(nn.Module):
    """Two layers that one rank skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.skips:
            participate(self.up, x)
            participate(self.down, x)
            return x
        return x + self.down(self.up(x))


@on_ranks(2)
@pytest.mark.parametrize("skips", [False, True])
def test_a_rank_may_skip_all_modules_of_a_list(skips: bool, rank: int) -> None:
    plain = seeded(Branching)
    model: Any = copy.deepcopy(plain)
    fully_shard([model.up, model.down])
    fully_shard(model)
    model.skips = plain.skips = skips and rank == 1
    for step in range(2):
        for each in (plain, model):
            square_loss(each, batch(rank, step)).backward()
        average_gradients(plain)
        torch.testing.assert_close(grads_of(model), grads_of(plain))
        model.zero_grad()
        plain.zero_grad()
