"""Parameters that are frozen, and trained again, between steps."""

from __future__ import annotations

import pytest

from tests.support import on_ranks
from tests.support.both_sides import Layout, beside_case


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_freezing_and_unfreezing_between_steps_is_followed(strategy: str) -> None:
    beside = beside_case("uneven sizes", "originals", Layout(strategy))
    for step in range(5):
        for model in beside.models:
            model.second.requires_grad_(step not in (1, 2))
            model.last.linear.weight.requires_grad_(step < 3)
        beside.train()
