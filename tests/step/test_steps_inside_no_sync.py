"""An optimizer step on gradients that no backward has reduced yet: an error by the step itself, nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fsdp_flat.errors import UsageError
from tests.step.pairs import KINDS, Pair, batch, placed
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import Stack, full_params, square_loss

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    f"{kind.__name__}{suffix}": partial(kind, **options, **more)
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01, "eps": 0.1}),
        (torch.optim.AdamW, {"lr": 0.01, "eps": 0.1}),
    )
    for suffix, more in (
        (" with momentum" * ("momentum" in options), {}),
        (" with momentum" * ("momentum" in options) + " foreach", {"foreach": True}),
        (" with momentum" * ("momentum" in options) + " one by one", {"foreach": False}),
    )
}


def backward_in_no_sync(pair: Pair, rank: int, step: int = 0) -> None:
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank, step)).backward()
    pair.follow(step=step)


def check_refused(pair: Pair, optimizer: torch.optim.Optimizer) -> None:
    before = full_params(pair.model)
    with pytest.raises(UsageError, match="no_sync") as caught:
        optimizer.step()
    assert "outside" in str(caught.value), caught.value
    assert_equal(full_params(pair.model), before, what="weights")


@KINDS
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@on_ranks(2)
def test_a_step_after_backwards_in_no_sync_only_is_refused_and_the_next_one_is_right(
    kind: str, use_orig_params: bool, rank: int
) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS[kind](pair.model.parameters())
    plain_optimizer = OPTIMIZERS[kind](pair.plain.parameters())
    for round_ in range(2):
        backward_in_no_sync(pair, rank, 3 * round_)
        check_refused(pair, optimizer)
        backward_in_no_sync(pair, rank, 3 * round_ + 1)
        check_refused(pair, optimizer)
        pair.backward(step=3 * round_ + 2)
        pair.check_gradients("gradients of two backwards in no_sync and one outside")
        optimizer.step()
        plain_optimizer.step()
        pair.check_parameters()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()


@KINDS
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("layout", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 1x2"])
@on_ranks(2)
def test_a_step_after_backwards_in_no_sync_only_is_refused_under_other_strategies(
    layout: str, kind: str, use_orig_params: bool, rank: int
) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    optimizer = OPTIMIZERS[kind](pair.model.parameters())
    backward_in_no_sync(pair, rank)
    check_refused(pair, optimizer)
    pair.backward(step=1)
    pair.check_gradients()


@KINDS
@on_ranks(2)
def test_a_step_inside_no_sync_is_refused_too(use_orig_params: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    with pair.model.no_sync():
        square_loss(pair.model, batch(rank)).backward()
        with pytest.raises(UsageError, match="no_sync"):
            optimizer.step()


@KINDS
@on_ranks(2)
def test_a_step_on_reduced_gradients_and_a_backward_in_no_sync_on_top_is_refused(
    use_orig_params: bool, rank: int
) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    pair.backward()
    backward_in_no_sync(pair, rank, 1)
    check_refused(pair, optimizer)
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
@on_ranks(2)
def test_gradients_may_be_read_inside_no_sync(use_orig_params: bool, rank: int) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    norms: list[Any] = []
    for step in range(2):
        backward_in_no_sync(pair, rank, step)
        for param in pair.model.parameters():
            assert (param.grad is None) == (param.numel() == 0)
            if param.grad is None:
                continue
            assert param.grad.shape == param.shape
            norms.append(float(param.grad.norm()))
            assert torch.isfinite(param.grad + param.grad.clone() * 2).all()
    assert max(norms) > 0
    pair.backward(step=2)
    pair.check_gradients("gradients that were read on the way")


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
        square_loss(pair.model, batch(rank)).backward()
        pair.model.zero_grad(set_to_none=False)
    for param in pair.model.parameters():
        if param.numel():
            assert param.grad is not None
            assert not param.grad.any()
    pair.train()


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
