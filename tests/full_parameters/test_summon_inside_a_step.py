"""``summon_full_params`` inside a forward or a backward is refused, as by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.both_sides import Layout
from tests.support.torch_and_ours import SHARDED, Side, on_both_sides


class Caller(nn.Module):
    """Summons its own unit in forward, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.summon: Any = None
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self.summon()
        y = self.linear(x)
        if self.where == "backward":
            y.register_hook(lambda _grad: self.summon())
        return y


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_summon_inside_forward_or_backward_is_refused(
    side: Side, layout: Layout, use_orig_params: bool, where: str
) -> None:
    caller = Caller()
    model = side.wrap(nn.Sequential(caller, nn.Linear(5, 1)), layout, units=(Caller,), use_orig_params=use_orig_params)

    def summon() -> None:
        with side.FSDP.summon_full_params(model):
            pass

    caller.summon, caller.where = summon, where
    with pytest.raises((ValueError, AssertionError)):
        model(torch.ones(2, 5)).sum().backward()
