"""Gradients that a program clips or replaces between two backwards of any kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accumulation.test_cleared_between_backwards import BACKWARDS
from tests.support import assert_close, on_ranks
from tests.support.beside import CLOSE, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.kit import square_loss
from tests.support.models import Stack
from tests.support.selection import some

MAX_NORM = 0.05
CLIP: dict[str, Callable[[Any], Any]] = {
    "the wrapper's": lambda model: model.clip_grad_norm_(MAX_NORM),
    "torch's": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
}


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_gradients_clipped_between_backwards_stay_clipped(layout: str, front: str, rank: int) -> None:
    beside = Beside(Stack(), front, **placed(layout))
    for first, second, clip in some(itertools.product(("reducing", "sharded"), BACKWARDS, CLIP), 3):
        beside.zero_grad()
        with BACKWARDS[first](beside.ours):
            square_loss(beside.ours, batch(rank)).backward()
            norm = CLIP[clip](beside.ours)
        beside.follow()
        expected = torch.nn.utils.clip_grad_norm_(beside.plain.parameters(), MAX_NORM)
        assert_close(norm, expected, **CLOSE, what="norm")
        assert norm > MAX_NORM
        with BACKWARDS[second](beside.ours):
            square_loss(beside.ours, batch(rank, 1)).backward()
        beside.follow(step=1)
        beside.backward(step=2)
        beside.check_gradients(f"gradients after {first}, {clip} and {second}")


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_gradient_that_a_caller_replaces_inside_no_sync_by_a_scaled_one_leaves_the_reduced_one_alone(
    front: str, rank: int
) -> None:
    """As on FSDP1, which keeps the reduced gradient elsewhere until the next reduction."""
    beside = Beside(Stack(), front)
    beside.backward()
    with beside.ours.no_sync():
        square_loss(beside.ours, batch(rank, 1)).backward()
        for param in beside.ours.parameters():
            assert param.grad is not None
            param.grad.data = 0.5 * param.grad
    beside.follow(lambda *args: 0.5 * square_loss(*args), step=1)
    beside.backward(step=2)
    beside.check_gradients()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_gradient_of_the_local_shard_that_a_caller_assigns_inside_no_sync_replaces_all_before(
    front: str, rank: int
) -> None:
    beside = Beside(Stack(), front)
    beside.backward()
    with beside.ours.no_sync():
        square_loss(beside.ours, batch(rank, 1)).backward()
        for param in beside.ours.parameters():
            param.grad = torch.full_like(param, 0.25)
    for param in beside.plain.parameters():
        param.grad = torch.full_like(param, 0.25)
    beside.backward(step=2)
    beside.check_gradients()
