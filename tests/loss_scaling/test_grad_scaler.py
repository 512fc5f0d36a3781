"""``torch.amp.GradScaler`` skips a step on all ranks or on none, as ``ShardedGradScaler`` does, on both fronts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat.sharded_grad_scaler import ShardedGradScaler
from tests.support import assert_equal, on_ranks
from tests.support.beside import blocks_and_root
from tests.support.kit import full_params, square_loss
from tests.support.wrapper_models import batch, mesh_options, seeded, shard

FRONTS: dict[str, Callable[[Any], Any]] = {
    "flat": lambda model: shard(model),
    "originals": lambda model: shard(model, use_orig_params=True),
    "hybrid": lambda model: shard(model, "HYBRID_SHARD", use_orig_params=True, **mesh_options("HYBRID_SHARD")),
    "fully_shard": blocks_and_root,
    "hybrid fully_shard": lambda model: blocks_and_root(model, mesh=init_device_mesh("cpu", (2, 2))),
}


def local_grads(model: nn.Module) -> list[torch.Tensor]:
    """This rank's gradients with elements."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    locals_ = [getattr(grad, "_local_tensor", grad) for grad in grads]
    return [each for each in locals_ if each.numel()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("front", FRONTS)
@on_ranks(4)
def test_an_inf_on_one_rank_skips_the_step_on_every_rank(front: str, unscales: bool, fused: bool, rank: int) -> None:
    found = []
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        model = FRONTS[front](seeded())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = kind("cpu", init_scale=64.0)
        scales = []
        for step in range(4):
            before = full_params(model)
            scaler.scale(square_loss(model, batch(rank, step))).backward()
            if step % 2 and rank == 2:
                local_grads(model)[0].view(-1)[0] = float("inf")
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
            same = [torch.equal(value, before[name]) for name, value in full_params(model).items()]
            assert all(same) if step % 2 else not all(same), (step, same)
        assert scales == [64.0, 32.0, 32.0, 16.0]
        found.append(full_params(model))
    assert_equal(found[0], found[1], what="weights")


@on_ranks(2)
def test_a_rank_without_gradients_has_a_part_in_the_decision(rank: int) -> None:
    model = shard(nn.Linear(1, 1, bias=False), by_blocks=False, use_orig_params=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    for is_inf in (False, True):
        scaler.scale(square_loss(model, torch.ones(2, 1))).backward()
        if is_inf and rank == 0:
            local_grads(model)[0].fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 1.0


@on_ranks(2)
def test_models_that_no_unit_shards_are_torchs_business(rank: int) -> None:
    shard(seeded())
    model = seeded()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(square_loss(model, batch(rank))).backward()
    if rank == 0:
        local_grads(model)[0].fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (1.0 if rank == 0 else 2.0)
