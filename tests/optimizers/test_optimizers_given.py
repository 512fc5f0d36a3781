"""Optimizers that cannot work on slices, or whose states are of whole parameters: errors with the parameter's name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MatrixOptimizer, ShardingStrategy, unwrap
from fsdp_flat.core import Guard, guards_in_use, use_guards
from fsdp_flat.errors import OptionError, UsageError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import square_loss, train_on
from tests.support.models import Model
from tests.support.wrapper_models import batch

BUILDERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train_on(model, optimizer, [batch(0)])


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.of_guards
@on_ranks(2)
def test_an_optimizer_with_states_from_before_wrapping_is_refused_by_name_and_changes_nothing() -> None:
    for kind, build in BUILDERS.items():
        module = Model()
        optimizer = build(module.parameters())
        if kind != "Adagrad":  # which makes its states at once
            trained(module, optimizer)
        model = FSDP(module, use_orig_params=True)
        square_loss(model, batch(0)).backward()
        before = weights(model)
        with pytest.raises(UsageError, match=r"'first.weight' \(5, 3\) of unit 'Model'.*rank holds.*after wrapping"):
            optimizer.step()
        assert_equal(weights(model), before)
        # One that has no states yet goes on working on the same parameters.
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.of_guards
@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_states_of_the_unwrapped_model_loaded_as_they_are_are_refused(use_orig_params: bool) -> None:
    # Of one parameter, so that torch finds as many in the state dict as there are flat ones.
    plain = nn.Linear(3, 2, bias=False)
    model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
    given = BUILDERS["Adam"](plain.parameters())
    plain(batch(0)).sum().backward()
    given.step()
    optimizer = BUILDERS["Adam"](model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(given.state_dict()))
    with pytest.raises(UsageError, match="optim_state_dict_to_load"):
        optimizer.step()


class Shampoo(torch.optim.SGD):
    """By its name one that needs whole parameters."""


class ShampooOfSlices(Shampoo):
    """By its name one that needs whole parameters, but made for slices."""

    works_on_slices = True


@pytest.mark.of_guards
@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Shampoo])
def test_an_optimizer_that_needs_whole_parameters_is_refused_on_slices(kind: Any, use_orig_params: bool) -> None:
    model = FSDP(Model(), use_orig_params=use_orig_params)
    square_loss(model, batch(0)).backward()
    before = weights(model)
    named = r"'first.weight' \(5, 3\) of unit" if use_orig_params else "a flat parameter"
    with pytest.raises(
        UsageError,
        match=rf"{kind.__name__} computes with full parameters.*{named}.*another algorithm\. Use fsdp_flat\.Matrix",
    ):
        kind(model.parameters(), lr=0.1).step()
    assert_equal(weights(model), before)
    ShampooOfSlices(model.parameters(), lr=0.1).step()


def step_with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = square_loss(model, batch(0))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


class SlicedLBFGS(torch.optim.LBFGS):
    """By its name one that needs all parameters, but made for slices."""

    works_on_slices = True


@pytest.mark.of_guards
@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_lbfgs_is_refused_on_slices_and_as_a_matrix_optimizer(use_orig_params: bool) -> None:
    model = FSDP(Model(), use_orig_params=use_orig_params)
    before = weights(model)
    named = r"'first.weight' \(5, 3\) of unit" if use_orig_params else "a flat parameter"
    with pytest.raises(UsageError, match=rf"LBFGS computes dot products over all parameters.*{named}.*Use NO_SHARD"):
        step_with_closure(model, torch.optim.LBFGS(model.parameters()))
    assert_equal(weights(model), before)
    with pytest.raises(OptionError, match="LBFGS computes dot products over all parameters, and MatrixOptimizer"):
        MatrixOptimizer(model, torch.optim.LBFGS)
    step_with_closure(model, SlicedLBFGS(model.parameters(), max_iter=2))


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_lbfgs_trains_as_unwrapped_where_no_unit_shards(use_orig_params: bool) -> None:
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        model = FSDP(Model(), use_orig_params=use_orig_params, sharding_strategy=ShardingStrategy.NO_SHARD)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        step_with_closure(each, torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=3))
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-4, atol=1e-6)


def test_every_optimizer_of_torch_is_known_to_take_slices_or_not() -> None:
    known = {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
        # They refuse or are refused local shards; SparseAdam refuses their dense gradients.
        *("Adafactor", "LBFGS", "Muon", "SparseAdam"),
    }
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    assert kinds <= known


class Told(Guard):
    """Notes the optimizers that it is told of."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)


@on_ranks(2)
def test_a_guard_is_told_of_an_optimizer_once_and_again_after_a_change_or_a_load() -> None:
    model, plain, told = FSDP(Model(), use_orig_params=True), Model(), Told()
    optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    before = use_guards([*guards_in_use(), told])
    try:
        for each, build in ((model, lambda: optimizer), (plain, lambda: BUILDERS["SGD"](plain.parameters()))):
            trained(each, build())
            trained(each, build())
        assert told.optimizers == [optimizer]  # and of none that holds no parameters of units
        optimizer.add_param_group({"params": list(model.parameters())[1:]})
        for _ in range(2):
            trained(model, optimizer)
        assert told.optimizers == [optimizer] * 2
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            trained(model, optimizer)
        assert told.optimizers == [optimizer] * 3
        trained(unwrap(model), optimizer)  # its parameters are those of the unwrapped model now
        assert told.optimizers == [optimizer] * 4
    finally:
        use_guards(before)
