"""The comparisons that the tests of this folder use can fail."""

from __future__ import annotations

import pytest
import torch

from tests.support import on_ranks
from tests.support.kit import Stack, square_loss
from tests.support.steps import Twin, assert_idle, batch


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_gradient_that_differs_from_the_plain_models_or_is_missing_fails(use_orig_params: bool, rank: int) -> None:
    twin = Twin.of(Stack(), use_orig_params=use_orig_params)
    square_loss(twin.model, batch(rank)).backward()
    for other in range(2):
        (square_loss(twin.plain, batch(other)) / 2).backward()
    twin.check_gradients()
    twin.plain.head.weight.grad[0, 0] += 1e-3
    with pytest.raises(AssertionError, match=r"gradients\['head.weight'\]: 1 of 40 elements differ"):
        twin.check_gradients()
    twin.plain.head.weight.grad = None
    with pytest.raises(AssertionError):
        twin.check_gradients()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_step_after_which_a_parameter_differs_from_the_plain_models_fails(use_orig_params: bool) -> None:
    twin = Twin.of(Stack(), use_orig_params=use_orig_params)
    twin.step()
    with torch.no_grad():
        twin.plain.first.bias[3] += 1e-3
    with pytest.raises(AssertionError, match=r"parameters\['first.bias'\]: 1 of 8 elements differ"):
        twin.check_parameters()


@on_ranks(2)
def test_a_model_between_forward_and_backward_is_not_idle(rank: int) -> None:
    twin = Twin.of(Stack())
    twin.step()
    loss = square_loss(twin.model, batch(rank))
    with pytest.raises(AssertionError, match="Stack is not sharded"):
        assert_idle(twin.model)
    loss.backward()
    assert_idle(twin.model)
