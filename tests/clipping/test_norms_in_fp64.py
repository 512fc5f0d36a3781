"""``clip_grad_norm_`` of fp64 gradients: an fp64 norm, to the last digits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from tests.support import assert_close, on_ranks
from tests.support.kit import Stack
from tests.support.pairs import FOUR_RANKS, KINDS, TWO_RANKS, Pair, placed


def check_norms(layout: str, use_orig_params: bool) -> None:
    pair = Pair.of(Stack(), use_orig_params=use_orig_params, **placed(layout))
    cases = itertools.product((2.0, 1.0, 3.0, math.inf), (1e-3, 1e3))
    for step, (norm_type, max_norm) in enumerate(cases):
        pair.backward(step=step)
        norm = pair.model.clip_grad_norm_(max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm, norm_type)
        assert expected.dtype is torch.float64
        assert_close(norm, expected, rtol=1e-12, atol=0.0, what=f"norm of order {norm_type}")
        pair.check_gradients("clipped gradients")
        pair.step(lr=0.01)


@KINDS
@pytest.mark.parametrize("layout", TWO_RANKS)
@on_ranks(2)
def test_the_norm_of_fp64_gradients_is_torchs_fp64_norm(layout: str, use_orig_params: bool) -> None:
    check_norms(layout, use_orig_params)


@KINDS
@pytest.mark.parametrize("layout", FOUR_RANKS)
@on_ranks(4)
def test_the_norm_of_fp64_gradients_is_torchs_fp64_norm_on_four_ranks(layout: str, use_orig_params: bool) -> None:
    check_norms(layout, use_orig_params)
