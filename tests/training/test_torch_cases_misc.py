"""The cases of torch's suite of miscellany.

Covered: outputs in named tuples; outputs that the loss does not use; units that compute without gradients; evaluation
between steps with prefetch; ranks that start from different weights with ``sync_module_states``; optimizers that step
inside backward; training on CPUs with ``device_id``; where parameters of auto-wrapped units live; modules without
parameters; a group of one rank; units whose settings differ; containers as units; ignored modules on the meta device;
values of ``repr``, ``check_is_root`` and attributes that show the arguments.

Not covered: devices that do not fit (two accelerators, or a model on CPU and accelerator at once), ``device_id``
without an index, the switch to unsafe ``setattr``, the order of CUDA streams: none exists on CPUs, or is internal.
``sync_module_states`` of a CPU model without ``device_id`` is an error in torch and works here.
"""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import OWN_STATISTICS, assert_equal
from tests.support.beside import adamw
from tests.support.both_sides import Layout, batch_of, build
from tests.support.kit import train_on
from tests.support.models import Layer
from tests.support.torch_and_ours import (
    BLOCKS,
    ORIG,
    SHARDED,
    Side,
    beside_replica,
    on_both_sides,
    sgd,
    state_of,
    step_input,
    train,
    trained,
)
from tests.support.transport import rank_device
from tests.support.zoo import CASES

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


def step_inside_backward(optimizer: Any, model: nn.Module, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # The package compiles functions with torch.jit when it is imported.
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer, model.parameters(), options)


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


class Branches(nn.Module):
    """Two layers, of which the second is called or not; its output is not in the loss."""

    def __init__(self, calls_second: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.calls_second = calls_second

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.first(x), self.second(x)] if self.calls_second else [self.first(x)]


@on_both_sides()
@pytest.mark.parametrize("calls_second", [True, False], ids=["called", "not called"])
def test_a_unit_that_is_not_in_the_loss_has_no_gradient(
    side: Side, layout: Layout, use_orig_params: bool, calls_second: bool
) -> Any:
    torch.manual_seed(2)
    inner = Branches(calls_second)
    model = side.wrap(inner, layout, units=(nn.Linear,), use_orig_params=use_orig_params)
    for step in range(3):
        model(step_input(dist.get_rank(), step))[0].sum().backward()
    assert all(param.grad is not None for param in inner.first.parameters() if param.numel() > 0)
    assert [param.grad for param in inner.second.parameters()] == [None] * (2 if use_orig_params else 1)
    sgd(model).step()
    return state_of(model)


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("forward", [False, True], ids=["no forward prefetch", "forward prefetch"])
def test_evaluation_between_steps_changes_no_number(
    side: Side, layout: Layout, use_orig_params: bool, forward: bool
) -> Any:
    case = BLOCKS
    ends = []
    for evaluates in (False, True):
        model = side.wrap_case(case, layout, use_orig_params=use_orig_params, forward_prefetch=forward)
        optimizer = adamw(model)
        for step in range(3):
            if evaluates:
                model.eval()
                with torch.no_grad():
                    case.loss_of(model, batch_of(case, dist.get_rank(), 50 + step))
                model.train()
            train(model, case, optimizer, [step])
        ends.append(state_of(model))
    assert_equal(ends[1], ends[0])
    return ends[0]


@on_both_sides(torch_cannot="it wants an accelerator for sync_module_states")
def test_ranks_that_start_apart_are_made_equal_from_rank_zero(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    case = CASES["buffers"]
    expected = build(case).state_dict()
    model = build(case)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(dist.get_rank())
    model = side.wrap(model, layout, units=case.units, use_orig_params=use_orig_params, sync_module_states=True)
    state = state_of(model)
    assert_equal(state, {name: value.detach() for name, value in expected.items()})
    return state


@on_both_sides(layouts=SHARDED, kinds=ORIG)
@pytest.mark.parametrize("optim", ["sgd", "adam"])
def test_optimizers_that_step_inside_backward_give_the_numbers_of_one_after_it(
    side: Side, layout: Layout, use_orig_params: bool, optim: str
) -> Any:
    case = CASES["uneven sizes"]
    cls, options = {"sgd": (torch.optim.SGD, {"lr": 0.1}), "adam": (torch.optim.AdamW, {"lr": 0.05, "eps": 0.1})}[optim]
    inside = build(case)
    step_inside_backward(cls, inside, options)
    inside = side.wrap(inside, layout, units=case.units, use_orig_params=use_orig_params)
    after = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    optimizer = cls(after.parameters(), **options)
    for step in range(3):
        batch = batch_of(case, dist.get_rank(), step)
        case.loss_of(inside, batch).backward()
        train_on(after, optimizer, [batch], case.loss_of)
        assert all(param.grad is None for param in inside.parameters())
    assert_equal(state_of(inside), state_of(after))
    return state_of(after)


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


@on_both_sides(layouts=SHARDED)
def test_a_group_of_one_rank_trains_without_sharding(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    case = CASES["uneven sizes"]
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with pytest.warns(UserWarning, match="(?s)NO_SHARD"):
        model = side.wrap_case(case, layout, use_orig_params=use_orig_params, process_group=group)
    losses = train(model, case, adamw(model))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()} if use_orig_params else None
    return {"losses": losses, "state": state_of(model), "shapes": shapes}


class Containers(nn.Module):
    """A list and a dict of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ModuleList([nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"one": nn.Linear(4, 4)})


@on_both_sides()
def test_wrapping_a_container_warns(side: Side, use_orig_params: bool) -> None:
    model = Containers()
    for container in (model.some, model.named):
        with pytest.warns(UserWarning, match="(?i)forward"):
            side.wrap(container, use_orig_params=use_orig_params)


@on_both_sides(layouts=SHARDED)
def test_an_ignored_module_may_stay_on_the_meta_device(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    before = [*model[1].parameters()]
    wrapped = side.wrap(model, layout, ignored_modules=[model[1]], use_orig_params=use_orig_params)
    assert [param.device.type for param in model[1].parameters()] == ["meta", "meta"]
    assert all(now is then for now, then in zip(model[1].parameters(), before, strict=True))
    return sum(param.numel() for param in wrapped.parameters() if param.device.type != "meta")


@on_both_sides()
def test_attributes_show_the_arguments_of_construction(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(
        BLOCKS, layout, use_orig_params=use_orig_params, forward_prefetch=True, limit_all_gathers=False
    )
    assert model.check_is_root()
    units = side.units(model)
    assert [unit.check_is_root() for unit in units[1:]] == [False] * (len(units) - 1)
    assert side.FSDP.fsdp_modules(model, root_only=True) == [model]
    assert "_fsdp_wrapped_module" in repr(model)
    return [
        [unit.sharding_strategy.name, unit.rank, unit.world_size, unit.backward_prefetch.name, unit._has_params]
        for unit in units
    ]


@on_both_sides()
def test_attributes_items_and_length_are_those_of_the_wrapped_module(side: Side, use_orig_params: bool) -> Any:
    inner = nn.Sequential(Layer(5, 5), nn.Linear(5, 2))
    inner.note = "kept"
    model = side.wrap(inner, units=(Layer,), use_orig_params=use_orig_params)
    assert model.note == "kept"
    assert model[1] is inner[1]
    assert isinstance(model[0], side.FSDP)
    assert model.module is inner
    with pytest.raises(AttributeError):
        _ = model.no_such_thing
    return [name for name, _ in model.named_modules()]


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
