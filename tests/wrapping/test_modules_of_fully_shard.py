"""Modules under fully_shard: ties, buffers, ignored parameters, attributes, slices, copies and lists of modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_flat import CPUOffload
from fsdp_flat.composable import DataParallelMeshDims, fully_shard
from fsdp_flat.errors import TiedParameterError
from tests.support import OWN_PARAMETERS, on_ranks
from tests.support.beside import BOTH, Beside
from tests.support.kit import seeded, square_loss, train_on
from tests.support.peer import peer_fully_shard


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


@on_ranks(2, 4)
def test_ties_inside_a_unit_stay_and_train_as_one(rank: int) -> None:
    plain, model = seeded(Tied), seeded(Tied)
    fully_shard(model.middle)
    fully_shard(model)
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for seed in (1, 2):
            torch.manual_seed(seed)
            train_on(each, optimizer, [torch.randint(11, (3, 4))])
    assert model.head.weight is model.embedding.weight
    state = model.state_dict()
    assert state["head.weight"].to_local().data_ptr() == state["embedding.weight"].to_local().data_ptr()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name].full_tensor(), value)
    fresh = seeded(Tied, 5)
    fully_shard(fresh)
    fresh.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=bool(rank < 9))
    tokens = torch.arange(11)
    torch.testing.assert_close(fresh(tokens), plain(tokens))
    assert fresh.head.weight is fresh.embedding.weight


@on_ranks(2)
def test_a_tie_between_two_units_raises() -> None:
    model = seeded(Tied)
    fully_shard(model.embedding)
    with pytest.raises(TiedParameterError, match=r"'weight' of unit 'Linear' is the same parameter as 'weight'"):
        fully_shard(model.head)
    model = seeded(Tied)
    fully_shard([model.embedding, model.head])
    assert model.head.weight is model.embedding.weight


@on_ranks(2)
@OWN_PARAMETERS
def test_ignored_parameters_and_buffers_stay_as_they_are() -> None:
    plain, model = seeded(), seeded()
    for each in (plain, model):
        each.register_buffer("scale", torch.full((3,), 2.0))
        each.register_buffer("passing", torch.ones(2), persistent=False)
    ignored, buffers = {model.head.weight, model.blocks[0].up.bias}, dict(model.named_buffers())
    for block in model.blocks:
        fully_shard(block, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    assert model.head.weight in ignored
    assert model.blocks[0].up.bias in ignored
    assert sum(isinstance(param, DTensor) for param in model.parameters()) == len(list(plain.parameters())) - 2
    assert all(dict(model.named_buffers())[name] is buffer for name, buffer in buffers.items())
    square_loss(model, torch.ones(2, 8)).backward()
    square_loss(plain, torch.ones(2, 8)).backward()
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
    assert set(model.state_dict()) == set(plain.state_dict())
    assert not isinstance(model.state_dict()["head.weight"], DTensor)


@on_ranks(2)
@pytest.mark.parametrize("function", [fully_shard, peer_fully_shard])
def test_a_parameter_that_an_inner_call_ignores_is_ignored_by_outer_calls(function: Any) -> None:
    model = seeded()
    ignored = model.blocks[0].up.weight
    function(model.blocks[0], ignored_params={ignored})
    function(model)
    assert model.blocks[0].up.weight is ignored
    assert all(isinstance(param, DTensor) for param in model.parameters() if param is not ignored)


class Chain(nn.ModuleList):
    """Runs its modules one after another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = torch.tanh(module(x))
        return x


@on_ranks(2)
def test_a_list_with_a_forward_is_a_unit(rank: int) -> None:
    beside = Beside(Chain([nn.Linear(8, 8) for _ in range(2)]), BOTH, units=())
    assert [type(model).__name__ for model in beside.models] == ["FSDPChain", "FSDPChain", "Chain"]
    beside.train()
    for function in (fully_shard, peer_fully_shard):
        with pytest.raises(ValueError, match="forward"):
            function(nn.ModuleList([nn.Linear(4, 4)]))


@on_ranks(2)
@pytest.mark.parametrize("function", [fully_shard, peer_fully_shard])
def test_a_module_inside_another_of_the_list_is_no_member_of_the_unit(function: Any) -> None:
    model = seeded()
    assert function([model.blocks[0].up, model]) == [model.blocks[0].up, model]
    assert type(model.blocks[0].up) is nn.Linear
    assert type(model).__name__ == "FSDPStack"
    square_loss(model, torch.ones(2, 8)).backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@on_ranks(2)
def test_a_module_may_be_twice_in_the_list() -> None:
    model = seeded()
    fully_shard([model.blocks[0], model.blocks[0]])
    fully_shard(model)
    square_loss(model, torch.ones(2, 8)).backward()
    assert type(model.blocks[0]).__name__ == "FSDPBlock"
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


class Caching(nn.Linear):
    """Computes with a copy of the reference to its weight, which it updates when one is assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["cached"] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.__dict__["cached"], self.bias)


@on_ranks(2)
def test_a_module_that_notes_assignments_gets_its_parameters_by_assignment() -> None:
    Beside(nn.Sequential(Caching(8, 8), nn.Linear(8, 8)), ("originals", *BOTH), units=()).train(num_steps=2)


@on_ranks(2)
def test_attributes_of_parameters_survive() -> None:
    model = seeded()
    model.first.weight.decay = 0.5  # type: ignore[assignment]
    model.first.bias.requires_grad_(False)
    fully_shard(model)
    assert model.first.weight.decay == 0.5
    assert not model.first.bias.requires_grad
    seen = []
    model.first.register_forward_hook(lambda module, *_: seen.append((module.weight.decay, type(module.weight))))
    square_loss(model, torch.ones(2, 8)).backward()
    assert seen == [(0.5, nn.Parameter)]
    assert model.first.bias.grad is None
    model.double()
    assert model.first.weight.decay == 0.5
    assert not model.first.bias.requires_grad
    assert model.first.weight.dtype == torch.float64


@on_ranks(2)
@pytest.mark.parametrize("function", [fully_shard, peer_fully_shard])
def test_a_sequential_slices_to_one_of_its_own_class(function: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    plain = copy.deepcopy(model)
    for layer in model:
        function(layer)
    function(model)
    part = model[1:]
    assert type(part) is nn.Sequential
    assert list(part) == list(model)[1:]
    torch.testing.assert_close(part(torch.ones(2, 4)), plain[1:](torch.ones(2, 4)))
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[0]).__name__ == "FSDPLinear"
    assert type(model[0]) is type(model[1])
    assert isinstance(model[0], nn.Linear)


@on_ranks(2)
@pytest.mark.parametrize("function", [fully_shard, peer_fully_shard])
def test_sharded_modules_are_neither_copied_nor_pickled(function: Any) -> None:
    model = function(seeded())
    for each in (copy.deepcopy, pickle.dumps):
        with pytest.raises((TypeError, AssertionError, AttributeError, pickle.PicklingError)):
            each(model)
    # The state dict may be copied.
    copied = copy.deepcopy(model.state_dict())
    own = model.state_dict()
    for name, value in copied.items():
        assert value.to_local().data_ptr() != own[name].to_local().data_ptr()
        torch.testing.assert_close(value.to_local(), own[name].to_local())
    model.load_state_dict(copied)


@on_ranks(2)
def test_arguments_that_cannot_be_used_are_refused_and_change_nothing() -> None:
    sharded = fully_shard(seeded())
    mesh = init_device_mesh("cpu", (1, 2, 1))
    for module, arguments, error, text in (
        ("model", {}, TypeError, r"must be an nn\.Module or a list of them; got str"),
        ([], {}, ValueError, "an empty list of modules"),
        (nn.ModuleList([nn.Linear(2, 2)]), {}, ValueError, "ModuleList, which has no forward"),
        (sharded, {}, ValueError, "Stack is sharded already"),
        (seeded(), {"mesh": "all"}, TypeError, "must be a DeviceMesh; got 'all'"),
        (seeded(), {"mesh": mesh}, ValueError, "one dim .* or two .*got 3"),
        (seeded(), {"offload_policy": CPUOffload(True)}, TypeError, "must be an OffloadPolicy; got CPUOffload"),
        (seeded(), {"shard_placement_fn": lambda param: 1}, ValueError, "must return a Shard or None; got 1"),
    ):
        children = list(module.modules()) if isinstance(module, nn.Module) else []
        classes = [type(child) for child in children]
        with pytest.raises(error, match=text):
            fully_shard(module, **arguments)
        assert [type(child) for child in children] == classes


def test_without_a_process_group_or_a_dim_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="fully_shard needs a process group"):
        fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="needs a dim to shard over"):
        DataParallelMeshDims()
