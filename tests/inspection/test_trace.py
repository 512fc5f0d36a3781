"""``composable.trace`` records the events of steps, of a model and of several below a plain module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.composable import trace
from tests.support import on_ranks
from tests.support.beside import APPLY, FRONTS, batch
from tests.support.kit import square_loss
from tests.support.models import Block


def blocks(front: str, number: int = 2) -> nn.Sequential:
    return nn.Sequential(*[APPLY[front](Block().double()) for _ in range(number)])


@FRONTS
@on_ranks(2)
def test_a_trace_inside_another_ends_alone(front: str) -> None:
    (model,) = blocks(front, 1)
    with trace(model) as outer:
        with trace(model) as inner:
            square_loss(model, batch(dist.get_rank())).backward()
        seen = list(inner)
        with torch.no_grad():
            model(batch(dist.get_rank()))
    assert ("reduce_scatter", "Block") in seen
    assert inner == seen
    assert [event for event, _ in outer][:1] == ["pre_forward"]
    assert ("reduce_scatter", "Block") not in outer


@FRONTS
@on_ranks(2)
def test_all_outermost_units_below_a_plain_module_are_traced(front: str) -> None:
    model = blocks(front)
    with trace(model) as events:
        square_loss(model, batch(dist.get_rank())).backward()
    assert [event for event, _ in events].count("pre_forward") == 2
    assert [event for event, _ in events].count("reduce_scatter") == 2
