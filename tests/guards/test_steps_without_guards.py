"""Programs that change, return or store what a step handles give the same with guards and without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard
from fsdp_flat.guards import guards_off
from tests.support import assert_equal, on_ranks
from tests.support.beside import grads_of
from tests.support.kit import full_grads, normal, seeded
from tests.support.models import Stored

# Each test runs with the guards that are on, and without.
GUARDS: tuple[Callable[[], AbstractContextManager[None]], ...] = (nullcontext, guards_off)


def sharded(front: str, module: nn.Module) -> nn.Module:
    return fully_shard(module) if front == "fully_shard" else FSDP(module, use_orig_params=front == "originals")


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return full_grads(model) if isinstance(model, FSDP) else grads_of(model)


FRONT = pytest.mark.parametrize("front", ["flat", "originals", "fully_shard"])


@on_ranks(2)
@FRONT
def test_values_assigned_to_parameters_are_computed_with(front: str) -> None:
    x = normal(0, 3, 4)
    for guards in GUARDS:
        with guards():
            model = sharded(front, seeded(lambda: nn.Linear(4, 4)))
            if front != "fully_shard":  # which takes such values only before its first all-gather
                model(x).sum().backward()
            for name, param in list(model.named_parameters()):
                if front == "fully_shard":
                    setattr(model, name, nn.Parameter(torch.zeros_like(param)))
                else:
                    param.data = torch.zeros_like(param.data)
            output = model(x)
        assert_equal(output, torch.zeros(3, 4))


@on_ranks(2)
def test_a_model_on_meta_takes_a_state_dict_by_assignment() -> None:
    plain, x = seeded(lambda: nn.Linear(4, 4)), normal(0, 3, 4)
    for guards in GUARDS:
        with guards():
            with torch.device("meta"):
                model = nn.Linear(4, 4)
            fully_shard(model)
            state: Any = model.state_dict()
            loaded = {
                name: distribute_tensor(value, state[name].device_mesh, state[name].placements)
                for name, value in plain.state_dict().items()
            }
            model.load_state_dict(loaded, assign=True)
            assert_equal(model(x), plain(x))


class Doubles(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x)


@on_ranks(2)
@FRONT
def test_an_input_written_in_place_gets_the_gradient_of_all_its_uses(front: str) -> None:
    def gradient(model: nn.Module) -> torch.Tensor | None:
        leaf = torch.ones(3, 4, requires_grad=True)
        given = leaf * 1
        (model(given).sum() + given.sum()).backward()
        return leaf.grad

    expected = gradient(seeded(Doubles))
    for guards in GUARDS:
        with guards():
            actual = gradient(sharded(front, seeded(Doubles)))
        assert_equal(actual, expected)


class TwoStored(nn.Module):
    """Two units that store a tensor of their weights, of which the loss of the program is made too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = LateLoss(), Stored()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class LateLoss(nn.Module):
    """Stores an auxiliary loss that it computes after its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(5, 5), nn.Linear(5, 5)
        self.penalty: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.relu(self.linear(x))
        self.penalty = self.router(output).square().mean()
        return output


def with_penalties(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x).sum()
    return output + sum(module.penalty for module in model.modules() if isinstance(module, LateLoss | Stored))


@on_ranks(2)
@FRONT
def test_a_loss_of_tensors_that_blocks_stored_has_its_gradients(front: str) -> None:
    x, plain = normal(0, 3, 5), seeded(TwoStored)
    with_penalties(plain, x).backward()
    for guards in GUARDS:
        with guards():
            model = seeded(TwoStored)
            for name, block in model.named_children():
                setattr(model, name, sharded(front, block))
            model = sharded(front, model)
            with_penalties(model, x).backward()
            actual = grads(model)
        assert_equal(actual, grads_of(plain))


@pytest.mark.parametrize("api", ["FullyShardedDataParallel", "fully_shard"])
def test_a_model_whose_loss_is_of_stored_tensors_too_is_planned(api: Any) -> None:
    policy = fsdp_flat.wrap.ModuleWrapPolicy({LateLoss, Stored})
    arguments: Any = {"auto_wrap_policy": policy, "use_orig_params": True, "batch": torch.ones(2, 5), "api": api}
    without = fsdp_flat.plan(TwoStored(), 2, loss=lambda model, x: model(x).sum(), **arguments)
    found = fsdp_flat.plan(TwoStored(), 2, loss=with_penalties, **arguments)
    assert found.peak_nbytes > 0
    assert found.flops > without.flops > 0


class ReturnsWeight(nn.Module):
    """Returns a view of its weight, and puts another one into the caller's container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> Any:
        cache.append(self.linear.bias)
        return self.linear(x), self.linear.weight.view(-1)


@on_ranks(2)
@FRONT
def test_views_of_weights_that_a_module_hands_out_keep_their_values(front: str) -> None:
    plain, x = seeded(ReturnsWeight), normal(0, 3, 4)
    for guards in GUARDS:
        held: list[torch.Tensor] = []
        with guards():
            model = seeded(lambda: nn.Sequential(ReturnsWeight()))
            model[0] = sharded(front, model[0])
            sharded(front, model)
            output, weight = model[0](x, held)
            output.sum().backward()
        assert_equal(weight.detach(), plain.linear.weight.detach().view(-1))
        assert_equal(held[0].detach(), plain.linear.bias.detach())


class Rebinds(nn.Module):
    """Gives the data of its weight other memory in each forward, as layers of quantized weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = self.linear.weight.data.clone()
        return self.linear(x)


@on_ranks(2)
@FRONT
def test_data_that_a_forward_assigns_to_a_weight_is_not_that_of_the_next_step(front: str) -> None:
    x, plain = normal(0, 3, 4), seeded(Rebinds)

    def losses(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[torch.Tensor] = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                found += [loss, model(x).square().mean()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = [loss.detach() for loss in losses(plain)]
    for guards in GUARDS:
        with guards():
            actual = [loss.detach() for loss in losses(sharded(front, seeded(Rebinds)))]
        assert_equal(actual, expected)
