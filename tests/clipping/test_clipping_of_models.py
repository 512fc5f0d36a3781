"""Clipping returns and applies the norm of the replica's gradients, for models of many kinds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from torch import nn

from tests.support import Ranks, assert_close, on_ranks
from tests.support.beside import WRAPPER_FRONTS
from tests.support.both_sides import EVERY_LAYOUT, Layout, beside_case

RanksOf = Callable[..., Ranks]


def clip(name: str, layout: Layout, front: str) -> None:
    beside = beside_case(name, front, layout)
    # The last limits are far above the norm, so that nothing may change.
    for max_norm, norm_type in [(0.05, 2.0), (0.02, math.inf), (0.05, 1.0), (1e4, 2.0), (1e4, math.inf)]:
        beside.backward()
        expected = nn.utils.clip_grad_norm_(beside.plain.parameters(), max_norm, norm_type=norm_type)
        actual = beside.ours.clip_grad_norm_(max_norm, norm_type=norm_type)
        assert_close(float(actual), float(expected), **beside.tolerance, what=f"{norm_type}-norm")
        assert (float(expected) > max_norm) is (max_norm < 1.0)
        beside.check_gradients()
        beside.step()
    beside.check_state_dict()


@EVERY_LAYOUT
@WRAPPER_FRONTS
def test_clipping_returns_and_applies_the_norm_of_the_global_gradient(
    ranks: RanksOf, num_ranks: int, layout: Layout, front: str
) -> None:
    ranks(num_ranks).run(clip, "uneven sizes", layout, front)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["mixed dtypes", "adapters inside units", "unused branch", "tied across units"])
def test_clipping_counts_each_parameter_once(name: str) -> None:
    clip(name, Layout("FULL_SHARD"), "originals")
