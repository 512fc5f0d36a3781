"""Clipping counts each parameter once, in models of several dtypes, with adapters, unused branches and ties."""

from __future__ import annotations

import math

import pytest
from torch import nn

from tests.support import assert_close, on_ranks
from tests.support.both_sides import Layout, beside_case


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


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["mixed dtypes", "adapters inside units", "unused branch", "tied across units"])
def test_clipping_counts_each_parameter_once(name: str) -> None:
    clip(name, Layout("FULL_SHARD"), "originals")
