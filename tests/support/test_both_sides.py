"""A body that differs between torch's class and ours fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.both_sides import Layout
from tests.support.torch_and_ours import SHARDED, Side, on_both_sides


@on_both_sides(layouts=SHARDED)
def other_results(side: Side, layout: Layout) -> torch.Tensor:
    return torch.zeros(2) if side.is_torch or layout == SHARDED[0] else torch.tensor([0.0, 1e-3])


@on_both_sides(layouts=SHARDED)
def fails_on_ours(side: Side, layout: Layout) -> None:
    assert side.is_torch or layout == SHARDED[0]


def test_another_result_than_torch_s_fails_and_names_the_layout(ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"(?s)2 failures.*rank 0, SHARD_GRAD_OP: result: 1 of 2 elements differ"):
        other_results(ranks=ranks)


def test_an_assert_that_fails_on_one_side_names_the_side_and_the_layout(ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"(?s)2 failures.*rank 1, SHARD_GRAD_OP on ours"):
        fails_on_ours(ranks=ranks)
