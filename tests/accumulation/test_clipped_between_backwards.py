"""Part 6, siblings: gradients that a program clips or replaces between two backwards of any kind."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.compat import replace_torch_functions, restore_torch_functions
from tests.accumulation.test_cleared_between_backwards import BACKWARDS
from tests.support import assert_close, on_ranks
from tests.support.kit import Stack, square_loss
from tests.support.pairs import CLOSE, KINDS, Pair, batch, by_policy, placed

MAX_NORM = 0.05
CLIP: dict[str, Callable[[Any], Any]] = {
    "the wrapper's": lambda model: model.clip_grad_norm_(MAX_NORM),
    "torch's": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
}


def _mean_backward(plain: nn.Module, step: int) -> None:
    num_ranks = dist.get_world_size()
    for rank in range(num_ranks):
        (square_loss(plain, batch(rank, step)) / num_ranks).backward()


@KINDS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_gradients_clipped_between_backwards_stay_clipped(layout: str, use_orig_params: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    for first, second, clip in itertools.product(("reducing", "sharded"), BACKWARDS, CLIP):
        pair.zero_grad()
        with BACKWARDS[first](pair.model):
            square_loss(pair.model, batch(rank)).backward()
            norm = CLIP[clip](pair.model)
        _mean_backward(pair.plain, 0)
        expected = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), MAX_NORM)
        assert_close(norm, expected, **CLOSE, what="norm")
        assert norm > MAX_NORM
        with BACKWARDS[second](pair.model):
            square_loss(pair.model, batch(rank, 1)).backward()
        pair.follow(step=1)
        pair.backward(step=2)
        pair.check_gradients(f"gradients after {first}, {clip} and {second}")


@KINDS
@on_ranks(2)
def test_a_gradient_that_a_caller_replaces_inside_no_sync_by_a_scaled_one_leaves_the_reduced_one_alone(
    use_orig_params: bool, rank: int
) -> None:
    """As on FSDP1, which keeps the reduced gradient elsewhere until the next reduction."""
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    pair.backward()
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank, 1)).backward()
        for param in pair.model.parameters():
            assert param.grad is not None
            param.grad.data = 0.5 * param.grad
    pair.follow(lambda *args: 0.5 * square_loss(*args), step=1)
    pair.backward(step=2)
    pair.check_gradients()


@KINDS
@on_ranks(2)
def test_a_gradient_of_the_local_shard_that_a_caller_assigns_inside_no_sync_replaces_all_before(
    use_orig_params: bool, rank: int
) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    pair.backward()
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank, 1)).backward()
        for param in pair.model.parameters():
            param.grad = torch.full_like(param, 0.25)
    for param in pair.plain.parameters():
        param.grad = torch.full_like(param, 0.25)
    pair.backward(step=2)
    pair.check_gradients()


@on_ranks(2)
def test_torchs_own_zero_grad_is_back_after_restoring(rank: int) -> None:
    model: Any = by_policy(copy.deepcopy(Stack()).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = []
    try:
        for replace in (replace_torch_functions, restore_torch_functions):
            replace()
            model.zero_grad()
            with BACKWARDS["not last"](model):
                square_loss(model, batch(rank)).backward()
                optimizer.zero_grad()
            (square_loss(model, batch(rank)) * 0).backward()
            left.append(any(param.grad is not None and bool(param.grad.any()) for param in model.parameters()))
    finally:
        replace_torch_functions()
    assert left == [False, True]
