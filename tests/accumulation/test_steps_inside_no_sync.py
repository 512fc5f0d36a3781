"""Gradients between backwards inside ``no_sync``: what ``.grad`` shows, changes by the caller, and steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_flat import clean_tensor_name
from tests.support import assert_close, on_ranks
from tests.support.kit import Stack, full_params, square_loss
from tests.support.pairs import CLOSE, KINDS, Pair, batch, placed


def backward_in_no_sync(pair: Pair, rank: int, step: int = 0) -> None:
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank, step)).backward()
    pair.follow(step=step)


@KINDS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 1x2"])
@on_ranks(2)
def test_gradients_inside_no_sync_are_unsharded_and_this_ranks_own(
    layout: str, use_orig_params: bool, rank: int
) -> None:
    """As FSDP1 shows them, on every rank, also where it holds no elements of a parameter."""
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    plain = copy.deepcopy(pair.plain)
    for step in range(2):
        backward_in_no_sync(pair, rank, step)
        square_loss(plain, batch(rank, step)).backward()
        shown = {clean_tensor_name(name): param.grad for name, param in pair.model.named_parameters()}
        if use_orig_params:
            assert_close(shown, {name: param.grad for name, param in plain.named_parameters()}, **CLOSE)
        else:
            total = sum(param.grad.sum() for param in plain.parameters())  # type: ignore[union-attr]
            assert_close(sum(grad.sum() for grad in shown.values()), total, **CLOSE)  # type: ignore[union-attr]
    pair.backward(step=2)
    pair.check_gradients("gradients that were shown on the way")


@KINDS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_gradients_that_are_scaled_in_place_inside_no_sync_stay_scaled(
    layout: str, use_orig_params: bool, rank: int
) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank)).backward()
        for param in pair.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.25)
    pair.follow(lambda *args: 0.25 * square_loss(*args))
    pair.backward(step=1)
    pair.check_gradients("gradients of which a part was scaled")


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_some_gradients_of_a_unit_may_be_cleared_inside_no_sync(set_to_none: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=True)
    backward_in_no_sync(pair, rank)
    for model in (pair.model, pair.plain):
        for name, param in model.named_parameters():
            if name.endswith("weight"):
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.zero_()  # type: ignore[union-attr]
    pair.backward(step=1)
    pair.check_gradients("gradients of which the weights' were cleared")


@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP"])
@KINDS
@on_ranks(2)
def test_a_step_without_a_reduced_gradient_raises_as_on_fsdp1(layout: str, use_orig_params: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    backward_in_no_sync(pair, rank)
    with pytest.raises(RuntimeError, match="size of tensor"):
        torch.optim.SGD(pair.model.parameters(), lr=0.1).step()


@KINDS
@on_ranks(2)
def test_a_step_on_local_gradients_is_right_where_nothing_is_sharded(use_orig_params: bool, rank: int) -> None:
    """Local SGD: each replica goes its own way, as on FSDP1."""
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed("NO_SHARD"))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pair.model, pair.plain)]
    for step in range(2):
        with pair.model.no_sync():
            square_loss(pair.model, batch(rank, step)).backward()
        square_loss(pair.plain, batch(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pair.check_parameters()


@KINDS
@on_ranks(2)
def test_reduced_gradients_come_back_after_a_backward_in_no_sync(use_orig_params: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    pair.backward()
    backward_in_no_sync(pair, rank, 1)
    pair.backward(step=2)
    pair.check_gradients()


@KINDS
@on_ranks(2)
def test_a_step_after_backwards_in_sharded_no_sync_is_right(use_orig_params: bool, rank: int) -> None:
    """Their gradients are reduced already."""
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    with pair.model.no_sync(mode="sharded"):
        pair.backward()
    pair.check_gradients()
    pair.step()
    pair.check_parameters()


@KINDS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by_optimizer", [True, False], ids=["optimizer", "model"])
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_gradients_cleared_inside_no_sync_are_gone(
    layout: str, by_optimizer: bool, set_to_none: bool, use_orig_params: bool, rank: int
) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    for step in range(2):
        with pair.model.no_sync():
            square_loss(pair.model, batch(rank, 10 + step)).backward()
            (optimizer if by_optimizer else pair.model).zero_grad(set_to_none=set_to_none)
            square_loss(pair.model, batch(rank, step)).backward()
        pair.follow(step=step)
        pair.backward(step=5 + step)
        pair.check_gradients("gradients after the others were cleared")
        optimizer.step()
        torch.optim.SGD(pair.plain.parameters(), lr=0.1).step()
        pair.check_parameters()
        pair.zero_grad()


@KINDS
@on_ranks(2)
def test_gradients_filled_with_zeros_inside_no_sync_stay_zeros(use_orig_params: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank, 1)).backward()
        pair.model.zero_grad(set_to_none=False)
    for param in pair.model.parameters():
        assert param.grad is not None
        assert not param.grad.any()
    pair.backward(step=2)
    pair.check_gradients()


@KINDS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_a_gradient_of_zeros_that_is_scaled_leaves_the_reduced_one_alone(
    layout: str, use_orig_params: bool, rank: int
) -> None:
    """Rank 0 has a micro-batch without a token between a reduced backward and another one."""
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    pair.backward()

    def masked(model: nn.Module, x: torch.Tensor, of_rank: int) -> torch.Tensor:
        return square_loss(model, x) * (of_rank != 0)

    with pair.model.no_sync():
        masked(pair.model, batch(rank, 1), rank).backward()
        for param in pair.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
    pair.follow(lambda *args: 0.5 * masked(*args), step=1)
    pair.backward(step=2)
    pair.check_gradients("gradients of two reduced backwards and one on rank 1 alone")


@KINDS
@on_ranks(2)
def test_a_step_after_everything_was_cleared_inside_no_sync_changes_nothing(use_orig_params: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    before = full_params(pair.model)
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank)).backward()
        optimizer.zero_grad()
    optimizer.step()
    assert_close(full_params(pair.model), before, rtol=0.0, atol=0.0)
