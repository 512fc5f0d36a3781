"""The cases of torch's suite of fine-tuning.

Covered: frozen units below, between and above trained ones, with flat and original parameters, beside a replicated
model; the input that needs a gradient or does not; a frozen unit called several times in a forward; a unit of which
one module is shared by two places; all units are sharded after backward, in every one of these.

Not covered: how often internal functions reshard; replaced by which units are sharded when backward is over.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import on_ranks
from tests.support.both_sides import PLAIN, Layout, beside_case
from tests.support.kit import square_loss
from tests.support.models import Layer
from tests.support.torch_and_ours import SHARDED, Side, beside_replica, on_both_sides, sgd, state_of, step_input

FROZEN = {"first two": (0, 1), "alternate": (0, 2), "last two": (2, 3), "all but the first": (1, 2, 3)}


def stack(frozen: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(6)
    model = nn.Sequential(*[Layer(5, 5) for _ in range(4)])
    for index in frozen:
        model[index].requires_grad_(False)
    return model


@on_both_sides(layouts=PLAIN)
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_units_anywhere_train_as_unwrapped_and_end_sharded(
    side: Side, layout: Layout, use_orig_params: bool, which: str
) -> Any:
    # A frozen unit of its own for each layer; the root has no parameters of its own.
    model = side.wrap(stack(FROZEN[which]), layout, units=(Layer,), use_orig_params=use_orig_params)
    ends: list[list[bool]] = []
    state = beside_replica(
        model,
        stack(FROZEN[which]),
        square_loss,
        step_input,
        before_step=lambda each: ends.append(side.sharded_units(each)) if each is model else None,
    )
    # With the others torch leaves frozen units gathered.
    if layout.strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        assert all(all(end) for end in ends)
    return state


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("which", ["first two", "last two"])
def test_an_input_that_needs_a_gradient_gets_it_through_frozen_units(
    side: Side, layout: Layout, use_orig_params: bool, which: str
) -> Any:
    model = side.wrap(stack(FROZEN[which]), layout, units=(Layer,), use_orig_params=use_orig_params)
    plain = stack(FROZEN[which])
    grads = []
    for each in (model, plain):
        x = step_input(dist.get_rank(), 0).requires_grad_()
        square_loss(each, x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert all(side.sharded_units(model))
    return grads[0]


class Traversed(nn.Module):
    """One unit called three times, a second once between, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = Layer(5, 5)
        self.between = Layer(5, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.repeated(self.repeated(x))
        return self.head(self.repeated(self.between(x)))


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("frozen", ["repeated", "between", "both"])
@pytest.mark.parametrize("with_input", [False, True], ids=["input without", "input with gradient"])
def test_a_frozen_unit_called_several_times_ends_sharded(
    side: Side, layout: Layout, use_orig_params: bool, frozen: str, with_input: bool
) -> Any:
    torch.manual_seed(6)
    inner = Traversed()
    for name in ("repeated", "between"):
        if frozen in (name, "both"):
            getattr(inner, name).requires_grad_(False)
    model = side.wrap(inner, layout, units=(Layer,), use_orig_params=use_orig_params)
    optimizer = sgd(model)
    seen = []
    for step in range(2):
        x = step_input(dist.get_rank(), step).requires_grad_(with_input)
        optimizer.zero_grad()
        loss = square_loss(model, x)
        loss.backward()
        optimizer.step()
        seen.append([loss.detach(), x.grad])
        if layout.strategy == "FULL_SHARD":
            assert all(side.sharded_units(model))
    return [seen, state_of(model)]


@on_both_sides(kinds=(True,))
@pytest.mark.parametrize("wrapped_as", ["one unit", "units"])
def test_a_head_on_a_frozen_body_trains_in_one_unit_or_several(
    side: Side, layout: Layout, use_orig_params: bool, wrapped_as: str
) -> Any:
    units = (Layer,) if wrapped_as == "units" else ()
    model = side.wrap(stack((0, 1, 2)), layout, units=units, use_orig_params=use_orig_params)
    return beside_replica(model, stack((0, 1, 2)), square_loss, step_input)


@on_both_sides(layouts=SHARDED)
def test_units_frozen_below_an_unwrapped_trained_layer_train_as_unwrapped(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    # The root holds the trained layer itself, between the frozen units.
    def build() -> nn.Sequential:
        torch.manual_seed(6)
        model = nn.Sequential(Layer(5, 5), nn.Linear(5, 5), Layer(5, 5))
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        return model

    model = side.wrap(build(), layout, units=(Layer,), use_orig_params=use_orig_params)
    return beside_replica(model, build(), square_loss, step_input)


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_freezing_and_unfreezing_between_steps_is_followed(strategy: str) -> None:
    beside = beside_case("uneven sizes", "originals", Layout(strategy))
    for step in range(5):
        for model in beside.models:
            model.second.requires_grad_(step not in (1, 2))
            model.last.linear.weight.requires_grad_(step < 3)
        beside.train()
