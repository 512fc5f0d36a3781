"""The comparisons that the tests of this folder use can fail."""

from __future__ import annotations

import pytest
import torch

from tests.support import on_ranks
from tests.support.kit import Stack
from tests.support.pairs import KINDS, Pair


@KINDS
@on_ranks(2)
def test_one_element_of_a_gradient_that_differs_from_the_replicas_fails(use_orig_params: bool) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    pair.backward()
    pair.check_gradients()
    pair.plain.head.weight.grad[0, 0] += 1e-6
    with pytest.raises(AssertionError, match=r"'head.weight'\]: 1 of 40 elements differ"):
        pair.check_gradients()


@KINDS
@on_ranks(2)
def test_a_gradient_that_the_replica_lacks_or_has_alone_fails(use_orig_params: bool) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    pair.backward()
    pair.plain.blocks[1].up.weight.grad = None
    with pytest.raises(AssertionError, match=r"'blocks.1.up.weight'\]"):
        pair.check_gradients()
    pair.zero_grad()
    pair.follow()
    with pytest.raises(AssertionError, match=r"'first.weight'\]"):
        pair.check_gradients()


@KINDS
@on_ranks(2)
def test_one_element_of_a_parameter_that_differs_from_the_replicas_fails(use_orig_params: bool) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params)
    pair.train()
    with torch.no_grad():
        pair.plain.first.bias[3] += 1e-6
    with pytest.raises(AssertionError, match=r"parameters\['first.bias'\]: 1 of 8 elements differ"):
        pair.check_parameters()
