"""Cases of torch's suite of ``use_orig_params=True`` that are tested nowhere else: several optimizers and forwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close
from tests.support.beside import adamw, average_gradients
from tests.support.both_sides import TOLERANCE, Layout, batch_of, build
from tests.support.torch_and_ours import (
    ORIG,
    STRATEGIES,
    Side,
    beside_replica,
    on_both_sides,
    state_of,
)
from tests.support.zoo import CASES

UNEVEN = CASES["uneven sizes"]


def batch(rank: int, step: int) -> Any:
    return batch_of(UNEVEN, rank, step)


# -- hyperparameters -----------------------------------------------------------------------------------------------


def grouped(optimizer: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Weights and biases with unlike weight decay and learning rate."""
    named = list(model.named_parameters())
    weights = [param for name, param in named if name.endswith("weight")]
    others = [param for name, param in named if not name.endswith("weight")]
    return optimizer([{"params": weights, "weight_decay": 0.3}, {"params": others, "lr": 0.01, "weight_decay": 0.0}])


OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.05, eps=0.1),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.05, eps=0.1, foreach=True),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "momentum foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
}


@on_both_sides(layouts=STRATEGIES, kinds=ORIG)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_parameter_groups_of_unlike_hyperparameters_train_as_unwrapped(
    side: Side, layout: Layout, use_orig_params: bool, optim: str
) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    optimizer = partial(grouped, OPTIMIZERS[optim])
    return beside_replica(model, build(UNEVEN), UNEVEN.loss_of, batch, optimizer=optimizer)


@on_both_sides(kinds=ORIG)
def test_several_optimizers_of_which_some_skip_steps_train_as_unwrapped(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        named = list(model.named_parameters())
        return [
            torch.optim.AdamW([param for name, param in named if "weight" in name], lr=0.05, eps=0.1),
            torch.optim.SGD([param for name, param in named if "weight" not in name], lr=0.1, momentum=0.5),
        ]

    rank = dist.get_rank()
    model, plain = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params), build(UNEVEN)
    ours, theirs = optimizers(model), optimizers(plain)
    # In the second step only the first optimizer clears and steps, so that the others' gradients add up.
    for step, active in enumerate([(0, 1), (0,), (0, 1)]):
        for index in active:
            ours[index].zero_grad()
            theirs[index].zero_grad()
        UNEVEN.loss_of(plain, batch(rank, step)).backward()
        average_gradients(plain)
        UNEVEN.loss_of(model, batch(rank, step)).backward()
        for index in active:
            ours[index].step()
            theirs[index].step()
    state = state_of(model)
    assert_close(state, {name: value.detach() for name, value in plain.state_dict().items()}, **TOLERANCE)
    return state


# -- forwards and backwards ----------------------------------------------------------------------------------------


@on_both_sides()
def test_both_kinds_train_alike_through_two_forwards_and_a_summon_between_them(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    optimizer = adamw(model)
    rank = dist.get_rank()
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            first = model(batch(rank, step)["x"])
        with side.FSDP.summon_full_params(model):
            seen.append([param.detach().clone() for param in model.parameters()])
        loss = UNEVEN.loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        seen.append([first, loss.detach()])
    # A second round: the forward that is differentiated is the first of two.
    loss = UNEVEN.loss_of(model, batch(rank, 7)) + UNEVEN.loss_of(model, batch(rank, 8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"seen": seen, "state": state_of(model)}


# -- construction --------------------------------------------------------------------------------------------------
