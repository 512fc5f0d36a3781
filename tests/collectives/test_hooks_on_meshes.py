"""Communication hooks with one rank in a shard group, and modules of a unit that run outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, placed
from tests.support.models import Block, Stack


class TripledMean:
    """A hook: three times the mean over the shard group, which may be this rank alone."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.num_calls = 0

    def __call__(self, _state: Any, grad: torch.Tensor, out: torch.Tensor | None = None) -> None:
        self.num_calls += 1
        size = dist.get_world_size(self.group)
        dist.all_reduce(grad, group=self.group)
        grad.mul_(3 / size)
        if out is not None:
            out.copy_(grad.chunk(size)[dist.get_rank(self.group)])


def check_hook(layout: str, front: str) -> None:
    beside = Beside(Stack(), front, **placed(layout))
    hook = TripledMean(beside.ours.process_group)
    beside.ours.register_comm_hook(None, hook)
    for step in range(3):
        beside.backward()
        for param in beside.plain.parameters():
            param.grad *= 3
        beside.check_gradients(f"gradients of step {step}")
        beside.step()
    assert hook.num_calls == 3 * 4, "once for each unit in each step"


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 2x1", "HYBRID_SHARD 1x2"])
@on_ranks(2)
def test_replicas_are_averaged_after_a_communication_hook(layout: str, front: str) -> None:
    check_hook(layout, front)


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["HYBRID_SHARD 4x1", "HYBRID_SHARD 2x2"])
@on_ranks(4)
def test_replicas_of_four_ranks_are_averaged_after_a_communication_hook(layout: str, front: str) -> None:
    check_hook(layout, front)


@WRAPPER_FRONTS
@on_ranks(2)
def test_replicas_are_averaged_after_a_communication_hook_and_no_sync(front: str) -> None:
    beside = Beside(Stack(), front, **placed("HYBRID_SHARD 2x1"))
    beside.ours.register_comm_hook(None, TripledMean(beside.ours.process_group))
    with beside.ours.no_sync():
        beside.backward(step=0)
    beside.backward(step=1)
    for param in beside.plain.parameters():
        param.grad *= 3
    beside.check_gradients()


# -- a unit's module outside of the unit -------------------------------------------------------------------------------


class Direct(nn.Module):
    """Calls a layer of its block directly, beside the block itself; ``order`` says when."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = Block()
        self.head = nn.Linear(WIDTH, 2)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for what in self.order.split():
            if what == "unit":
                x = self.shared(x)
            else:
                # Of the wrapper, its attributes are those of the module inside.
                x = x + self.shared.up(x)[..., :WIDTH]
        return self.head(x)


def check_direct(layout: str, order: str, front: str) -> None:
    beside = Beside(Direct(order), front, **placed(layout))
    if layout == "HYBRID_SHARD 2x2" or (layout == "SHARD_GRAD_OP" and order.startswith("layer")):
        # The unit is sharded when its layer is called.
        with pytest.raises(UsageError, match=r"'up.weight' \(17, 8\) of unit 'shared' is sharded"):
            beside.train()
    else:
        beside.train(num_steps=3)


ORDERS = pytest.mark.parametrize("order", ["unit layer", "layer unit", "layer unit layer", "layer"])


@WRAPPER_FRONTS
@ORDERS
@pytest.mark.parametrize("layout", ["NO_SHARD", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 2x1", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_a_layer_of_a_unit_called_outside_of_it_is_right_or_refused_by_name(
    layout: str, order: str, front: str
) -> None:
    check_direct(layout, order, front)


@WRAPPER_FRONTS
@ORDERS
@pytest.mark.parametrize("layout", ["HYBRID_SHARD 4x1", "HYBRID_SHARD 2x2"])
@on_ranks(4)
def test_a_layer_of_a_unit_called_outside_of_it_is_right_or_refused_by_name_on_four_ranks(
    layout: str, order: str, front: str
) -> None:
    check_direct(layout, order, front)
