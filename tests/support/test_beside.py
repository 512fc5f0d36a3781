"""Each comparison of :class:`Beside` fails where it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import on_ranks
from tests.support.beside import APPLY, FRONTS, OURS, Beside, adamw, assert_idle, batch_of
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock, Stack

EVERY = pytest.mark.parametrize("front", list(APPLY))


@pytest.mark.every_value_in_quick("fronts of torch's that no other test has alone")
@EVERY
@on_ranks(2)
def test_every_front_trains_as_the_replica(front: str) -> None:
    Beside(Stack(), front).train(num_steps=2)


@pytest.mark.parametrize("front", [*OURS, "fsdp2"])
@on_ranks(2)
def test_one_element_of_a_gradient_that_differs_fails(front: str) -> None:
    beside = Beside(Stack(), front)
    beside.backward()
    beside.check_gradients()
    beside.plain.head.weight.grad[0, 0] += 1e-6
    beside.plain.head.weight.grad[-1, -1] += 1e-6
    with pytest.raises(AssertionError, match=r"gradients\['head.weight'\]: [12] of \d+ elements differ"):
        beside.check_gradients()


@FRONTS
@on_ranks(2)
def test_a_gradient_that_one_side_alone_has_fails(front: str) -> None:
    beside = Beside(Stack(), front)
    beside.backward()
    for param in beside.plain.blocks[1].parameters():
        param.grad = None
    with pytest.raises(AssertionError, match=r"'blocks.1.up.weight'\]"):
        beside.check_gradients()
    beside.zero_grad()
    beside.follow()
    with pytest.raises(AssertionError, match=r"'first.weight'\]"):
        beside.check_gradients()


@EVERY
@on_ranks(2)
def test_a_buffer_or_a_saved_parameter_that_differs_fails(front: str) -> None:
    beside = Beside(BufferedBlock(8), front, units=())
    beside.train()
    beside.check_state_dict()
    beside.plain.shift[3] += 1e-6
    with pytest.raises(AssertionError, match=r"state dict\['shift'\]: 1 of 8 elements differ"):
        beside.check_state_dict()
    beside.plain.shift[3] -= 1e-6
    with torch.no_grad():
        beside.plain.down.weight += 1e-6
    with pytest.raises(AssertionError, match=r"state dict\['down.weight'\]: \d+ of \d+ elements differ"):
        beside.check_state_dict()


def change_weights(beside: Beside) -> None:
    with torch.no_grad():
        for param in beside.ours.parameters():
            param.add_(1e-3)


@FRONTS
@on_ranks(2)
def test_another_loss_or_output_fails(front: str) -> None:
    beside = Beside(Stack(), front)
    change_weights(beside)
    with pytest.raises(AssertionError, match=r"loss of step 0: .* differ"):
        beside.backward()
    beside.zero_grad()

    def body(model: nn.Module, x: torch.Tensor) -> None:
        square_loss(model, x).backward()

    with pytest.raises(AssertionError, match=r"outputs of step 0\[0\]: .* differ"):
        beside.backward(body)


@FRONTS
@on_ranks(2)
def test_gradients_of_a_wrong_scale_fail_whatever_the_optimizer(front: str) -> None:
    beside = Beside(Stack(), front, optimizer=adamw)
    for (unit,) in beside.units():
        unit.set_gradient_divide_factor(2.02)
    beside.backward()
    beside.step()
    with pytest.raises(AssertionError, match="parameters"):
        beside.check_parameters()


LEFT: dict[str, Callable[[Any], Any]] = {
    "a forward": lambda model: square_loss(model, batch_of(0)),
    "an unsharded unit": lambda model: model.unshard(),
}


@FRONTS
@pytest.mark.parametrize("what", list(LEFT))
@on_ranks(2)
def test_a_model_with_something_left_is_not_idle(what: str, front: str) -> None:
    beside = Beside(Stack(), front)
    beside.train()
    assert_idle(beside.ours)
    left = LEFT[what](beside.ours)
    with pytest.raises(AssertionError):
        assert_idle(beside.ours)
    del left
