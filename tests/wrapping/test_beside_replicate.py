"""Runs fully_shard beside torch's replicate, which reduces the gradients of its modules by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from fsdp_flat import unwrap
from fsdp_flat.composable import fully_shard
from tests.support import on_ranks
from tests.support.beside import average_gradients
from tests.support.kit import batch, seeded, square_loss
from tests.support.models import Stack
from tests.support.peer import peer_fully_shard

# How a model is put together, and the modules whose parameters are sharded.
WAYS: dict[str, tuple[Callable[[Stack, Any], object], tuple[str, ...]]] = {
    "around": (lambda model, shard: (shard(model.blocks[0]), replicate(model)), ("blocks.0.",)),
    "inside": (
        lambda model, shard: (replicate(model.blocks[0]), shard(model)),
        ("first.", "blocks.1.", "blocks.2.", "head."),
    ),
    "beside": (
        lambda model, shard: (replicate(model.blocks[0]), shard(model.blocks[1]), shard(model)),
        ("first.", "blocks.1.", "blocks.2.", "head."),
    ),
    "between": (
        lambda model, shard: (shard(model.blocks[0].up), replicate(model.blocks[0]), shard(model)),
        ("first.", "blocks.0.up.", "blocks.1.", "blocks.2.", "head."),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("function", [fully_shard, peer_fully_shard])
@pytest.mark.parametrize("way", WAYS)
def test_replicated_and_sharded_modules_train_together(way: str, function: Any, rank: int) -> None:
    plain = seeded()
    model = copy.deepcopy(plain)
    build, sharded = WAYS[way]
    build(model, function)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, foreach=False) for each in (plain, model)]
    for step in range(3):
        with implicit_replication():
            for each in (plain, model):
                square_loss(each, batch(rank, step)).backward()
            average_gradients(plain)
            for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert isinstance(param, DTensor) == name.startswith(sharded), name
                grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                torch.testing.assert_close(grad, other.grad, msg=name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("function", [fully_shard, peer_fully_shard])
def test_a_sharded_module_cannot_be_replicated(function: Any) -> None:
    model = function(seeded())
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)


@on_ranks(2)
def test_an_unwrapped_module_can_be_replicated() -> None:
    model = seeded()
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model)
    unwrap(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    replicate(model)
    square_loss(model, torch.ones(2, 8)).backward()
    assert all(type(param) is nn.Parameter and param.grad is not None for param in model.parameters())
