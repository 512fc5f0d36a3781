"""Cases of torch's suite of optimizer state dicts that are tested nowhere else.

With sharded states every first dim is at least the number of ranks: torch fails for a rank without a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.state_dict.test_torch_cases import plain
from tests.support import assert_close, assert_equal
from tests.support.both_sides import TOLERANCE, Layout, build
from tests.support.models import Layer
from tests.support.torch_and_ours import FULL, ORIG, Side, on_both_sides, state_of, train
from tests.support.zoo import Case, squared_error, vectors


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


# -- models and optimizers of all kinds ----------------------------------------------------------------------------


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
