"""Gradients between backwards inside ``no_sync``: what ``.grad`` shows, changes by the caller, and steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_flat import clean_tensor_name
from fsdp_flat.errors import UsageError
from tests.support import assert_close, on_ranks
from tests.support.beside import CLOSE, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.kit import full_params, square_loss
from tests.support.models import Stack


def backward_in_no_sync(beside: Beside, rank: int, step: int = 0) -> None:
    with beside.ours.no_sync():
        square_loss(beside.ours, batch(rank, step)).backward()
    beside.follow(step=step)


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 1x2"])
@on_ranks(2)
def test_gradients_inside_no_sync_are_unsharded_and_this_ranks_own(layout: str, front: str, rank: int) -> None:
    """As FSDP1 shows them, on every rank, also where it holds no elements of a parameter."""
    beside = Beside(Stack(), front, **placed(layout))
    plain = copy.deepcopy(beside.plain)
    for step in range(2):
        backward_in_no_sync(beside, rank, step)
        square_loss(plain, batch(rank, step)).backward()
        shown = {clean_tensor_name(name): param.grad for name, param in beside.ours.named_parameters()}
        if front == "originals":
            assert_close(shown, {name: param.grad for name, param in plain.named_parameters()}, **CLOSE)
        else:
            total = sum(param.grad.sum() for param in plain.parameters())  # type: ignore[union-attr]
            assert_close(sum(grad.sum() for grad in shown.values()), total, **CLOSE)  # type: ignore[union-attr]
    beside.backward(step=2)
    beside.check_gradients("gradients that were shown on the way")


@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP"])
@WRAPPER_FRONTS
@on_ranks(2)
def test_a_step_without_a_reduced_gradient_raises_as_on_fsdp1(layout: str, front: str, rank: int) -> None:
    beside = Beside(Stack(), front, **placed(layout))
    backward_in_no_sync(beside, rank)
    with pytest.raises(UsageError, match=r"SGD\.step\(\) was called while gradients.*'blocks\.\d+'.* size of tensor"):
        torch.optim.SGD(beside.ours.parameters(), lr=0.1).step()


@on_ranks(2)
def test_a_step_that_finds_no_gradients_since_they_wait_says_so(rank: int) -> None:
    beside = Beside(Stack(), "fully_shard")
    beside.ours.set_requires_gradient_sync(False)
    square_loss(beside.ours, batch(rank)).backward()
    with pytest.warns(UserWarning, match=r"so it changes none of their parameters. Call set_requires_gradient_sync"):
        torch.optim.SGD(beside.ours.parameters(), lr=0.1).step()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_step_on_local_gradients_is_right_where_nothing_is_sharded(front: str, rank: int) -> None:
    """Local SGD: each replica goes its own way, as on FSDP1."""
    beside = Beside(Stack(), front, **placed("NO_SHARD"))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (beside.ours, beside.plain)]
    for step in range(2):
        with beside.ours.no_sync():
            square_loss(beside.ours, batch(rank, step)).backward()
        square_loss(beside.plain, batch(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    beside.check_parameters()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_step_after_backwards_in_sharded_no_sync_is_right(front: str, rank: int) -> None:
    """Their gradients are reduced already."""
    beside = Beside(Stack(), front)
    with beside.ours.no_sync(mode="sharded"):
        beside.backward()
    beside.check_gradients()
    beside.step()
    beside.check_parameters()


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_a_gradient_of_zeros_that_is_scaled_leaves_the_reduced_one_alone(layout: str, front: str, rank: int) -> None:
    """Rank 0 has a micro-batch without a token between a reduced backward and another one."""
    beside = Beside(Stack(), front, **placed(layout))
    beside.backward()

    def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return square_loss(model, x) * (rank != 0)

    with beside.ours.no_sync():
        masked(beside.ours, batch(rank, 1)).backward()
        for param in beside.ours.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
    beside.follow(lambda *args: 0.5 * masked(*args), step=1)
    beside.backward(step=2)
    beside.check_gradients("gradients of two reduced backwards and one on rank 1 alone")


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_step_after_everything_was_cleared_inside_no_sync_changes_nothing(front: str, rank: int) -> None:
    beside = Beside(Stack(), front)
    optimizer = torch.optim.SGD(beside.ours.parameters(), lr=0.1)
    before = full_params(beside.ours)
    with beside.ours.no_sync():
        square_loss(beside.ours, batch(rank)).backward()
        optimizer.zero_grad()
    optimizer.step()
    assert_close(full_params(beside.ours), before, rtol=0.0, atol=0.0)
