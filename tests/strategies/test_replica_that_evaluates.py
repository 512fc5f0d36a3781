"""One replica of a hybrid mesh evaluates alone, and all train on, as FSDP1 lets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import on_ranks
from tests.support.beside import FRONTS, MEMORY, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.models import Stack

HYBRIDS = pytest.mark.parametrize("layout", ["HYBRID_SHARD 2x2", "_HYBRID_SHARD_ZERO2 2x2"])


def evaluate(model: Any, steps: int = 2) -> None:
    with torch.no_grad():
        for step in range(steps):
            model(batch(dist.get_rank(), step))


@FRONTS
@MEMORY
@HYBRIDS
@on_ranks(4)
def test_first_replica_evaluates_between_steps(layout: str, front: str, shared_memory: bool) -> None:
    pair = Beside(Stack(), front, **placed(layout, front, shared_memory=shared_memory))
    for _ in range(2):
        pair.train(num_steps=2)
        if dist.get_rank() < 2:
            evaluate(pair.ours)
        dist.barrier()
    pair.train(num_steps=2)


@FRONTS
@pytest.mark.parametrize("keeps_outputs", [False, True])
@on_ranks(4)
def test_a_replica_may_evaluate_with_gradients_enabled(front: str, keeps_outputs: bool) -> None:
    pair = Beside(Stack(), front, **placed("HYBRID_SHARD 2x2", front))
    pair.train()
    outputs = []
    for step in range(3):
        if dist.get_rank() < 2:
            pair.ours.eval()
            output = pair.ours(batch(dist.get_rank(), step))
            outputs += [output] if keeps_outputs else []
            pair.ours.train()
        pair.train()
    # Forwards in evaluation mode that all ranks run, and a backward through them.
    for model in pair.models:
        model.eval()
    pair.train(num_steps=2)


@FRONTS
@on_ranks(4)
def test_second_replica_evaluates_before_the_first_step(front: str) -> None:
    pair = Beside(Stack(), front, **placed("HYBRID_SHARD 2x2", front))
    if dist.get_rank() >= 2:
        evaluate(pair.ours)
    pair.train(num_steps=2)


@WRAPPER_FRONTS
@on_ranks(4)
def test_replicas_evaluate_inside_an_accumulation(front: str) -> None:
    pair = Beside(Stack(), front, **placed("HYBRID_SHARD 2x2", front))
    pair.train()
    with pair.no_sync():
        pair.backward()
    if dist.get_rank() < 2:
        evaluate(pair.ours, 3)
    pair.train()
