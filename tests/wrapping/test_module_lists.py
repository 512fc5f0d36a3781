"""Several modules as one unit, all of which a rank may skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import participate
from tests.support import on_ranks
from tests.support.beside import Beside


class Branching(nn.Module):
    """Two layers that one rank skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.skips:
            participate(self.up, x)
            participate(self.down, x)
            return x
        return x + self.down(self.up(x))


@on_ranks(2)
@pytest.mark.parametrize("skips", [False, True])
def test_a_rank_may_skip_all_modules_of_a_list(skips: bool, rank: int) -> None:
    def shard(model: Any, apply: Any) -> Any:
        apply([model.up, model.down])
        return apply(model)

    beside = Beside(Branching(), "fully_shard", shard=shard)
    for model in beside.models:
        model.skips = skips and rank == 1
    beside.train(num_steps=2)
