"""Cases of torch's suite of miscellany that are tested nowhere else.

``sync_module_states`` of a CPU model without ``device_id`` is an error in torch and works here.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import OWN_STATISTICS, assert_equal
from tests.support.both_sides import Layout
from tests.support.kit import train_on
from tests.support.models import Layer
from tests.support.torch_and_ours import (
    BLOCKS,
    Side,
    beside_replica,
    on_both_sides,
    sgd,
    state_of,
    step_input,
    trained,
)
from tests.support.transport import rank_device

Outputs = namedtuple("Outputs", ["first", "second"])


class TwoOutputs(nn.Module):
    """Returns a named tuple; the second output has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, pair: Outputs) -> Outputs:
        return Outputs(self.first(pair.first), self.second(pair.second))


class NamedTuples(nn.Module):
    """Units that pass named tuples on."""

    def __init__(self) -> None:
        super().__init__()
        self.one = TwoOutputs()
        self.two = TwoOutputs()

    def forward(self, x: torch.Tensor) -> Outputs:
        return self.two(self.one(Outputs(x, x + 1)))


@on_both_sides()
@pytest.mark.parametrize("used", ["both", "first", "both on one rank"])
def test_named_tuples_stay_such_and_unused_outputs_do_no_harm(
    side: Side, layout: Layout, use_orig_params: bool, used: str
) -> Any:
    def batch(rank: int, step: int) -> tuple[torch.Tensor, bool]:
        return step_input(rank, step), used == "both" or (used == "both on one rank" and rank == 0)

    def loss_of(model: nn.Module, pair: tuple[torch.Tensor, bool]) -> torch.Tensor:
        out = model(pair[0])
        assert type(out) is Outputs
        loss = out.first.square().mean()
        return loss + out.second.square().mean() if pair[1] else loss

    torch.manual_seed(2)
    model, replica = NamedTuples(), NamedTuples()
    replica.load_state_dict(model.state_dict())
    wrapped = side.wrap(model, layout, units=(TwoOutputs,), use_orig_params=use_orig_params)
    return beside_replica(wrapped, replica, loss_of, batch, optimizer=sgd)


class NoGradUnit(nn.Module):
    """A trained layer whose own forward may switch gradients off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.linear(x)


@on_both_sides()
def test_a_unit_that_computes_without_gradients_keeps_its_parameters(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    torch.manual_seed(2)
    make = nn.Sequential(NoGradUnit(), Layer(5, 5), nn.Linear(5, 1))
    before = make[0].linear.weight.detach().clone()
    model = side.wrap(make, layout, units=(NoGradUnit, Layer), use_orig_params=use_orig_params)
    optimizer = sgd(model)
    train_on(model, optimizer, [step_input(dist.get_rank(), step) for step in range(2)])
    state = state_of(model)
    assert_equal(state["0.linear.weight"], before)
    return state


@on_both_sides()
@pytest.mark.parametrize("name", ["transformer", pytest.param("batch norm", marks=OWN_STATISTICS)])
def test_models_train_on_the_device_of_device_id(side: Side, layout: Layout, use_orig_params: bool, name: str) -> Any:
    return trained(side, name, layout, use_orig_params=use_orig_params, device_id=rank_device())


@on_both_sides()
def test_all_units_compute_and_stay_on_the_named_device(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(BLOCKS, layout, use_orig_params=use_orig_params)
    devices = {unit.compute_device.type for unit in side.units(model)} | {p.device.type for p in model.parameters()}
    assert devices == {rank_device().type}
    return len(side.units(model))


@on_both_sides()
def test_a_module_without_parameters_can_be_wrapped(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap(nn.Sequential(nn.ReLU(), nn.Tanh()), layout, use_orig_params=use_orig_params)
    assert list(model.parameters()) == []
    assert not model._has_params
    x = step_input(dist.get_rank(), 0).requires_grad_()
    out = model(x)
    out.sum().backward()
    with side.FSDP.summon_full_params(model):
        assert list(model.parameters()) == []
    return {"out": out.detach(), "grad": x.grad, "state": state_of(model)}


@on_both_sides(layouts=[Layout("FULL_SHARD"), Layout("NO_SHARD")])
def test_a_module_whose_units_have_all_its_parameters_can_be_wrapped_again(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    torch.manual_seed(2)
    inner = nn.Sequential(*[side.wrap(Layer(5, 5), layout, use_orig_params=use_orig_params) for _ in range(2)])
    model = side.wrap(inner, layout, use_orig_params=use_orig_params)
    train_on(model, sgd(model), [step_input(dist.get_rank(), step) for step in range(2)])
    before = model(step_input(0, 5))
    again = side.wrap(inner, layout, use_orig_params=use_orig_params)
    assert_equal(again(step_input(0, 5)).detach(), before.detach())
    return [before.detach(), state_of(again)]


@on_both_sides(kinds=(False,))
@pytest.mark.parametrize("what", ["use_orig_params", "limit_all_gathers", "FSDP_USE_FULL_PREC_IN_EVAL"])
def test_units_of_one_tree_with_unlike_settings_are_refused_in_forward(
    side: Side, use_orig_params: bool, what: str
) -> None:
    def wrapped(module: nn.Module, value: bool) -> Any:
        if what.islower():
            return side.wrap(module, **{what: value})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(what, str(int(value)))
            return side.wrap(module)

    model = wrapped(nn.Sequential(wrapped(nn.Linear(5, 5), True), nn.Linear(5, 1)), False)
    with pytest.raises(ValueError):
        model(step_input(dist.get_rank(), 0))
