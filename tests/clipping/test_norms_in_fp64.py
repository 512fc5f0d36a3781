"""``clip_grad_norm_`` of fp64 gradients: an fp64 norm, to the last digits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from tests.support import assert_close, on_ranks
from tests.support.beside import FOUR_RANKS, TWO_RANKS, WRAPPER_FRONTS, Beside, placed
from tests.support.models import Stack


def check_norms(layout: str, front: str) -> None:
    beside = Beside(Stack(), front, **placed(layout))
    cases = itertools.product((2.0, 1.0, 3.0, math.inf), (1e-3, 1e3))
    for step, (norm_type, max_norm) in enumerate(cases):
        beside.backward(step=step)
        norm = beside.ours.clip_grad_norm_(max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(beside.plain.parameters(), max_norm, norm_type)
        assert expected.dtype is torch.float64
        assert_close(norm, expected, rtol=1e-12, atol=0.0, what=f"norm of order {norm_type}")
        beside.check_gradients("clipped gradients")
        beside.step()


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", TWO_RANKS)
@on_ranks(2)
def test_the_norm_of_fp64_gradients_is_torchs_fp64_norm(layout: str, front: str) -> None:
    check_norms(layout, front)


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", FOUR_RANKS)
@on_ranks(4)
def test_the_norm_of_fp64_gradients_is_torchs_fp64_norm_on_four_ranks(layout: str, front: str) -> None:
    check_norms(layout, front)
