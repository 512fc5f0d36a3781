"""The cases of torch's suite of optimizer state dicts.

Covered: names, values and groups of full and sharded optimizer states beside an unwrapped optimizer; ``rank0_only``
and offloading; loads into the same wrapping, other wrappings, other strategies, fewer ranks, and plain models, and
back; the older functions ``full_``, ``sharded_``, ``shard_full_``, ``scatter_full_`` and ``flatten_sharded_`` and
``rekey_optim_state_dict`` with ids and names; modules that no unit manages; shared and frozen parameters; several
groups; optimizers without state, with states that are no tensors, and after some parameters had no gradient;
``load_directly``; states passed by hand, without groups, and of modules that one rank has; wrong calls.

Not covered: ``NamedOptimizer``; memory profiles; models of tests/tensor_parallel; the internal walk over names.
With sharded states every first dim is at least the number of ranks: torch fails for a rank without a chunk.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.state_dict.test_torch_cases import plain
from tests.support import assert_close, assert_equal
from tests.support.beside import average_gradients
from tests.support.both_sides import PLAIN, TOLERANCE, Layout, batch_of, build
from tests.support.kit import train_on
from tests.support.models import Layer, Outside, TiedInside
from tests.support.torch_and_ours import FULL, ORIG, STRATEGIES, Side, on_both_sides, state_of, train
from tests.support.zoo import CASES, Case, squared_error, vectors


class Even(nn.Module):
    """Units in a unit and parameters of the root; each first dim is at least 4."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(Layer(5, 6), nn.Linear(6, 7))
        self.last = Layer(7, 5)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(x)) * self.gain


EVEN = Case(build=Even, batch=vectors, loss_of=squared_error, units=(Layer,))
KINDS = pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, eps=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "plain": lambda params: torch.optim.SGD(params, lr=0.05),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adam"](model.parameters())


def values(states: dict[str, Any]) -> dict[str, Any]:
    """A state dict of an optimizer without order: names sorted, tensors copied, sharded ones as their local shards."""
    state = {
        name: {key: plain(value) if isinstance(value, torch.Tensor) else value for key, value in one.items()}
        for name, one in states["state"].items()
    }
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": sorted(group["params"])}
        for group in states.get("param_groups", [])
    ]
    return {"state": state, "param_groups": groups}


def save(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, kind: str = "FULL", **config: Any) -> Any:
    configs = {"FULL": side.api.FullOptimStateDictConfig, "SHARDED": side.api.ShardedOptimStateDictConfig}
    with side.state_dict_as(model, kind, None, configs[kind](**config)):
        return unshared(side.FSDP.optim_state_dict(model, optimizer))


def unshared(states: dict[str, Any]) -> dict[str, Any]:
    """The same with copies of plain tensors: where nothing is sharded, torch's states are the optimizer's own."""
    if not states:
        return states
    state = {
        name: {key: value.clone() if type(value) is torch.Tensor else value for key, value in one.items()}
        for name, one in states["state"].items()
    }
    return {**states, "state": state}


def load(
    side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, states: Any, kind: str = "FULL", **config: Any
) -> None:
    configs = {"FULL": side.api.FullOptimStateDictConfig, "SHARDED": side.api.ShardedOptimStateDictConfig}
    with side.state_dict_as(model, kind, None, configs[kind](**config)):
        optimizer.load_state_dict(side.FSDP.optim_state_dict_to_load(model, optimizer, states))


def unwrapped_states(case: Case, optim: str = "adam", num_steps: int = 2) -> dict[str, dict[str, Any]]:
    """The states by name after the same steps of a replicated model."""
    model = build(case)
    optimizer = OPTIMIZERS[optim](model.parameters())
    for index in range(num_steps):
        optimizer.zero_grad()
        case.loss_of(model, batch_of(case, dist.get_rank(), index)).backward()
        average_gradients(model)
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    return {names[index]: state for index, state in optimizer.state_dict()["state"].items()}


def trained_pair(
    side: Side, layout: Layout | None, use_orig_params: bool, case: Case = EVEN, optim: str = "adam"
) -> Any:
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS[optim](model.parameters())
    train(model, case, optimizer, range(2))
    return model, optimizer


def goes_on_alike(side: Side, first: Any, second: Any, case: Case = EVEN) -> Any:
    """Both models and optimizers take one more step; asserts that they end equal."""
    second[0].load_state_dict(first[0].state_dict())
    for model, optimizer in (first, second):
        train(model, case, optimizer, [7])
    assert_close(state_of(second[0]), state_of(first[0]), **TOLERANCE)
    return state_of(second[0])


# -- saving --------------------------------------------------------------------------------------------------------


@on_both_sides(layouts=STRATEGIES)
@pytest.mark.parametrize(
    "kind, optim", [*[("FULL", optim) for optim in OPTIMIZERS], ("SHARDED", "adam"), ("SHARDED", "momentum")]
)
def test_states_are_those_of_an_unwrapped_optimizer(
    side: Side, layout: Layout, use_orig_params: bool, kind: str, optim: str
) -> Any:
    model, optimizer = trained_pair(side, layout, use_orig_params, optim=optim)
    states = values(save(side, model, optimizer, kind))
    assert sorted(name for group in states["param_groups"] for name in group["params"]) == sorted(
        name for name, _ in build(EVEN).named_parameters()
    )
    if kind == "FULL":
        assert_close(states["state"], unwrapped_states(EVEN, optim), **TOLERANCE)
    elif layout.strategy == "NO_SHARD":
        return None  # torch cuts the states of flat parameters, and not those of original ones
    return states


@on_both_sides(layouts=PLAIN)
@pytest.mark.parametrize("rank0_only", [False, True], ids=["all ranks", "rank 0"])
@pytest.mark.parametrize("offload", [False, True], ids=["on device", "offloaded"])
def test_full_states_are_on_the_ranks_that_asked(
    side: Side, layout: Layout, use_orig_params: bool, rank0_only: bool, offload: bool
) -> Any:
    case = CASES["uneven sizes"]
    model, optimizer = trained_pair(side, layout, use_orig_params, case)
    states, expected = (
        save(side, model, optimizer, rank0_only=rank0_only, offload_to_cpu=offload),
        unwrapped_states(case),
    )
    if rank0_only and dist.get_rank() != 0:
        if layout.strategy != "NO_SHARD":
            assert states == {}
        return None
    assert_close(values(states)["state"], expected, **TOLERANCE)
    return values(states)


@on_both_sides(layouts=FULL)
@KINDS
def test_states_before_the_first_step_are_empty(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    model = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    optimizer = adam(model)
    states = save(side, model, optimizer, kind)
    assert states["state"] == {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The optimizer state dict to load has no state")
        load(side, model, optimizer, states, kind)
    return values(states)


# -- saving and loading --------------------------------------------------------------------------------------------


@on_both_sides(layouts=STRATEGIES)
@KINDS
@pytest.mark.parametrize("optim", ["adam", "momentum"])
def test_a_saved_optimizer_goes_on_in_another_model(
    side: Side, layout: Layout, use_orig_params: bool, kind: str, optim: str
) -> Any:
    first = trained_pair(side, layout, use_orig_params, optim=optim)
    model = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    second = model, OPTIMIZERS[optim](model.parameters())
    load(side, *second, save(side, *first, kind), kind)
    return goes_on_alike(side, first, second)


WRAPPINGS: dict[str, Any] = {
    "one unit": {"units": ()},
    "every layer": {"units": (Layer, nn.Sequential)},
    "not sharded": {"units": (Layer,), "layout": Layout("NO_SHARD")},
    "other kind": {"units": (Layer,), "other_kind": True},
}


@on_both_sides(layouts=FULL)
@KINDS
@pytest.mark.parametrize("to", WRAPPINGS)
def test_a_saved_optimizer_goes_on_in_another_wrapping(
    side: Side, layout: Layout, use_orig_params: bool, kind: str, to: str
) -> Any:
    if kind == "SHARDED" and to == "not sharded":
        return None  # local shards for two ranks do not fit one
    options = dict(WRAPPINGS[to])
    to_kind = use_orig_params ^ options.pop("other_kind", False)
    first = trained_pair(side, layout, use_orig_params)
    model = side.wrap(build(EVEN), options.pop("layout", layout), use_orig_params=to_kind, **options)
    second = model, adam(model)
    load(side, *second, save(side, *first, kind), kind)
    return goes_on_alike(side, first, second)


@on_both_sides(layouts=STRATEGIES)
def test_full_states_go_into_plain_optimizers_and_back(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, optimizer = trained_pair(side, layout, use_orig_params)
    states = save(side, model, optimizer)
    unwrapped = build(EVEN)
    plain_optimizer = adam(unwrapped)
    api = side.api
    by_id = side.FSDP.rekey_optim_state_dict(copy.deepcopy(states), api.OptimStateKeyType.PARAM_ID, unwrapped)
    plain_optimizer.load_state_dict(by_id)
    named = [name for name, _ in unwrapped.named_parameters()]
    kept = {named[index]: state for index, state in plain_optimizer.state_dict()["state"].items()}
    assert_close(kept, dict(states["state"]), **TOLERANCE)
    by_name = side.FSDP.rekey_optim_state_dict(
        plain_optimizer.state_dict(), api.OptimStateKeyType.PARAM_NAME, unwrapped, optim=plain_optimizer
    )
    other = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    second = other, adam(other)
    load(side, *second, by_name)
    return goes_on_alike(side, (model, optimizer), second)


@on_both_sides(num_ranks=4, layouts=FULL)
def test_a_saved_optimizer_goes_on_on_half_the_ranks(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, optimizer = trained_pair(side, layout, use_orig_params)
    states = save(side, model, optimizer)
    half = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    other = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params, process_group=half)
    second = adam(other)
    with side.state_dict_as(other, "FULL"):
        second.load_state_dict(side.FSDP.optim_state_dict_to_load(other, second, states, group=half))
        again = values(side.FSDP.optim_state_dict(other, second, group=half))
    assert_close(again["state"], values(states)["state"], **TOLERANCE)
    return again


# -- older functions -----------------------------------------------------------------------------------------------


@on_both_sides(layouts=STRATEGIES)
@pytest.mark.parametrize("by", ["shard", "scatter"])
@pytest.mark.parametrize("given", ["optim", "model alone"])
def test_the_older_functions_save_on_rank_zero_and_load_everywhere(
    side: Side, layout: Layout, use_orig_params: bool, by: str, given: str
) -> Any:
    if layout.strategy == "NO_SHARD" or (given == "model alone" and use_orig_params):
        return None
    model, optimizer = trained_pair(side, layout, use_orig_params)
    FSDP = side.FSDP
    arguments = {"optim": optimizer} if given == "optim" else {}
    states = FSDP.full_optim_state_dict(model, optimizer, rank0_only=by == "scatter")
    if by == "scatter" and dist.get_rank() != 0:
        assert states == {}
    found = values(states) if states else None
    other = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    second = adam(other)
    arguments = {"optim": second} if given == "optim" else {}
    if by == "scatter":
        local = FSDP.scatter_full_optim_state_dict(states or None, other, **arguments)
    else:
        local = FSDP.shard_full_optim_state_dict(states, other, **arguments)
    second.load_state_dict(local)
    return [found, goes_on_alike(side, (model, optimizer), (other, second))]


@on_both_sides(layouts=FULL)
def test_the_older_sharded_functions_make_a_round_trip(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, optimizer = trained_pair(side, layout, use_orig_params)
    with side.state_dict_as(model, "SHARDED"):
        states = side.FSDP.sharded_optim_state_dict(model, optimizer)
    other = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    second = adam(other)
    with side.state_dict_as(other, "SHARDED"):
        second.load_state_dict(side.FSDP.flatten_sharded_optim_state_dict(states, other, second))
    return [values(states), goes_on_alike(side, (model, optimizer), (other, second))]


@on_both_sides(layouts=FULL, kinds=(False,))
@pytest.mark.parametrize("wraps", [True, False], ids=["wrapped", "plain"])
def test_keys_change_between_names_and_ids(side: Side, layout: Layout, use_orig_params: bool, wraps: bool) -> Any:
    api, FSDP = side.api, side.FSDP
    model, optimizer = trained_pair(side, layout, use_orig_params)
    named = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    target = build(EVEN)
    ids = FSDP.rekey_optim_state_dict(copy.deepcopy(named), api.OptimStateKeyType.PARAM_ID, target)
    assert sorted(ids["state"]) == list(range(7))
    back = FSDP.rekey_optim_state_dict(copy.deepcopy(ids), api.OptimStateKeyType.PARAM_NAME, target)
    assert_equal(values(back), values(named))
    if wraps:
        with pytest.raises((AssertionError, ValueError)):
            FSDP.rekey_optim_state_dict(named, "names", target)
    return [values(ids), values(back)]


# -- models and optimizers of all kinds ----------------------------------------------------------------------------


def case_of(make: Callable[[], nn.Module]) -> Case:
    return Case(build=make, batch=vectors, loss_of=squared_error, units=(Layer,))


@on_both_sides(layouts=FULL)
@KINDS
def test_a_shared_parameter_has_one_state_under_its_first_name(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    case = Case(build=TiedInside, batch=vectors, loss_of=squared_error, units=())
    first = trained_pair(side, layout, use_orig_params, case)
    states = save(side, *first, kind)
    assert sorted(states["state"]) == ["down.bias", "up.bias", "up.weight"]
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    second = model, adam(model)
    load(side, *second, states, kind)
    return [values(states), goes_on_alike(side, first, second, case)]


@on_both_sides(layouts=FULL)
@KINDS
def test_parameters_that_no_unit_manages_are_saved_and_loaded(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    case = case_of(Outside)

    def wrapped() -> Any:
        model: Any = build(case)
        model.tree = side.wrap(model.tree, layout, units=(Layer,), use_orig_params=use_orig_params)
        return model, adam(model)

    first, second = wrapped(), wrapped()
    same = batch_of(case, 0, 0)  # every rank's: nobody reduces gradients outside wrappers
    case.loss_of(first[0], same).backward()
    first[1].step()
    states = save(side, *first, kind)
    # Before the load: torch makes both optimizers share their counters of steps.
    found = values(states)
    load(side, *second, states, kind)
    with side.state_dict_as(first[0], "FULL"):
        second[0].load_state_dict(first[0].state_dict())
    for model, optimizer in (first, second):
        train_on(model, optimizer, [same], case.loss_of)
    assert_close(state_of(second[0]), state_of(first[0]), **TOLERANCE)
    return [found, state_of(second[0])]


@on_both_sides(layouts=FULL, kinds=ORIG)
@KINDS
def test_frozen_parameters_have_no_state(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    def frozen() -> nn.Module:
        model = Even()
        model.block[1].weight.requires_grad_(False)
        model.last.requires_grad_(False)
        return model

    case = case_of(frozen)
    first = trained_pair(side, layout, use_orig_params, case)
    states = save(side, *first, kind)
    assert "block.1.weight" not in states["state"]
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    second = model, adam(model)
    load(side, *second, states, kind)
    return [values(states)["state"], goes_on_alike(side, first, second, case)]


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [param for name, param in named if "bias" in name], "lr": 0.02},
            {"params": [param for name, param in named if "bias" not in name], "weight_decay": 0.3},
        ],
        lr=0.05,
        eps=0.1,
    )


@on_both_sides(layouts=FULL, kinds=ORIG)
@KINDS
def test_groups_keep_their_members_and_settings(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    model = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    first = model, groups_of(model)
    train(*first[:1], EVEN, first[1], range(2))
    states = save(side, *first, kind)
    assert [sorted({"bias" in name for name in group["params"]}) for group in states["param_groups"]] == [
        [True],
        [False],
    ]
    other = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    second = other, groups_of(other)
    for group in second[1].param_groups:
        group["lr"] = 9.0
    load(side, *second, states, kind)
    assert [group["lr"] for group in second[1].param_groups] == [0.02, 0.05]
    return [values(states), goes_on_alike(side, first, second)]


class Skipping(nn.Module):
    """Its first layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


@on_both_sides(layouts=FULL)
@KINDS
def test_a_first_unit_without_gradient_leaves_the_others_states(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    case = Case(build=Skipping, batch=vectors, loss_of=squared_error, units=(nn.Linear,))
    first = trained_pair(side, layout, use_orig_params, case)
    states = save(side, *first, kind)
    assert sorted(states["state"]) == ["second.bias", "second.weight"]
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    second = model, adam(model)
    load(side, *second, states, kind)
    return [values(states), goes_on_alike(side, first, second, case)]


@on_both_sides(layouts=FULL)
def test_states_that_are_no_tensors_are_kept(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    first = trained_pair(side, layout, use_orig_params)
    for state in first[1].state.values():
        state["number"] = 17
        state["nothing"] = None
    states = save(side, *first)
    assert {one["number"] for one in states["state"].values()} == {17}
    assert {one["nothing"] for one in states["state"].values()} == {None}
    model = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    second = model, adam(model)
    load(side, *second, states)
    assert {state["number"] for state in second[1].state.values()} == {17}
    return values(states)


@on_both_sides(layouts=FULL)
@KINDS
def test_a_state_dict_may_be_passed_by_hand(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    model, optimizer = trained_pair(side, layout, use_orig_params)
    configs = {"FULL": side.api.FullOptimStateDictConfig, "SHARDED": side.api.ShardedOptimStateDictConfig}
    with side.state_dict_as(model, kind, None, configs[kind]()):
        by_hand = side.FSDP.optim_state_dict(model, optimizer, optimizer.state_dict())
        states = side.FSDP.optim_state_dict(model, optimizer)
    assert_equal(values(by_hand), values(states))
    return values(by_hand)


@on_both_sides(layouts=FULL)
def test_states_without_groups_are_saved_and_loaded_without(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, optimizer = trained_pair(side, layout, use_orig_params)
    own = copy.deepcopy(optimizer.state_dict())
    groups = own.pop("param_groups")
    with side.state_dict_as(model, "FULL"):
        states = unshared(side.FSDP.optim_state_dict(model, optimizer, own))
        assert "param_groups" not in states
        train(model, EVEN, optimizer, [5])
        local = side.FSDP.optim_state_dict_to_load(model, optimizer, states)
    optimizer.load_state_dict({**local, "param_groups": groups})
    assert_equal(optimizer.state_dict()["state"], own["state"])
    return values(states)


class OwnPart(nn.Module):
    """A wrapped part beside a layer that only this rank has."""

    def __init__(self, side: Side, layout: Layout, use_orig_params: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.dense = side.wrap(Layer(5, 5), layout, use_orig_params=use_orig_params)
        setattr(self, f"own{dist.get_rank()}", nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(getattr(self, f"own{dist.get_rank()}")(x))


@on_both_sides(layouts=FULL, kinds=ORIG)
def test_modules_that_only_one_rank_has_go_with_wrapped_ones(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    models = [OwnPart(side, layout, use_orig_params) for _ in range(2)]
    optimizers = [adam(model) for model in models]
    x = torch.ones(2, 5) + dist.get_rank()
    for index, num_steps in enumerate((1, 2)):
        for _ in range(num_steps):
            optimizers[index].zero_grad()
            models[index](x).square().mean().backward()
            optimizers[index].step()
    states = save(side, models[0], optimizers[0])
    load(side, models[1], optimizers[1], states)
    assert_equal(values(save(side, models[1], optimizers[1])), values(states))
    # The groups are rank 0's with FSDP1, and those of all ranks here.
    return values(states)["state"]


@on_both_sides(layouts=FULL)
@KINDS
def test_a_state_dict_may_be_loaded_directly(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    first = trained_pair(side, layout, use_orig_params)
    states = save(side, *first, kind)
    model = side.wrap_case(EVEN, layout, use_orig_params=use_orig_params)
    second = model, adam(model)
    with side.state_dict_as(model, kind):
        side.FSDP.optim_state_dict_to_load(model, second[1], states, load_directly=True)
    return goes_on_alike(side, first, second)


@on_both_sides(layouts=FULL)
def test_keys_of_an_unknown_or_of_both_types_are_refused(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model, optimizer = trained_pair(side, layout, use_orig_params)
    states = save(side, model, optimizer)
    with pytest.raises((AssertionError, ValueError)):
        side.FSDP.rekey_optim_state_dict(states, 3, build(EVEN))
    mixed = {"state": {0: {}, "a": {}}, "param_groups": [{"params": [0, "a"]}]}
    with pytest.raises((AssertionError, ValueError, KeyError)):
        side.FSDP.rekey_optim_state_dict(mixed, side.api.OptimStateKeyType.PARAM_ID, build(EVEN))


@on_both_sides(layouts=FULL, kinds=(False,))
def test_optim_input_warns_that_it_is_old(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, optimizer = trained_pair(side, layout, use_orig_params)
    with pytest.warns(FutureWarning, match="optim_input"):
        states = side.FSDP.full_optim_state_dict(model, optimizer, optim_input=list(model.parameters()))
    return values(states) if states else None
