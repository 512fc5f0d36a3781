"""``plan`` of models and losses as callers write them leaves the process, the model and torch as they were."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import plan
from fsdp_flat.tools.planned_step import APIS
from fsdp_flat.wrap import CustomPolicy, lambda_auto_wrap_policy
from tests.support.models import Stack
from tests.support.pool import spawn

DEVICES = pytest.mark.parametrize("device_type", ["cpu", "cuda"])
X = torch.ones(4, 8)


class Caching(nn.Module):
    """Has tensors in containers, a generator, and makes a tensor on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.cache = {"angles": [torch.ones(8)]}
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.ones(8, device=x.device.type)


@DEVICES
def test_tensors_in_containers_and_devices_by_their_type_are_planned(device_type: str) -> None:
    found = plan(Caching(), 8, batch=X, device_type=device_type)
    assert found.phases
    assert len(found.units) == 1


@DEVICES
def test_a_loss_with_tensors_of_its_own_is_planned(device_type: str) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(8))
    target = torch.zeros(4, dtype=torch.long)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return criterion(model(batch), target)

    assert plan(nn.Linear(8, 8), 8, batch=X, loss=loss, device_type=device_type).phases


@DEVICES
def test_synchronized_batch_norm_is_planned(device_type: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    assert plan(model, 8, batch=X, device_type=device_type).phases


def test_a_model_without_managed_parameters_has_no_units() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    assert plan(model, 8, ignored_modules=[model[0]]).units == ()


def test_a_search_reads_a_generator_of_ignored_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    given = [plan(model, 8, batch=X, fit="1GB", ignored_states=make(model[0].parameters())) for make in (iter, list)]
    assert str(given[0]) == str(given[1])


def plan_and_compare(_rank: int) -> None:
    def functions() -> tuple[Any, ...]:
        return nn.utils.clip_grad_norm_, torch.autograd.grad, torch.optim.Optimizer.zero_grad

    before = functions()
    plan(nn.Linear(8, 8), 8, batch=torch.ones(4, 8))
    assert before == functions()


def test_functions_of_torch_are_its_own_after_a_plan() -> None:
    spawn(plan_and_compare, num_ranks=1)  # in a process that has made no model


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", ["a function", "lambda_auto_wrap_policy", "CustomPolicy"])
def test_a_policy_that_knows_modules_by_identity_plans_those(kind: str, api: str) -> None:
    model = Stack(4)
    known = {id(model.blocks[1]), id(model.blocks[2])}

    def asked(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or id(module) in known

    policies: dict[str, Any] = {
        "a function": asked,
        "lambda_auto_wrap_policy": partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in known),
        "CustomPolicy": CustomPolicy(lambda module: id(module) in known),
    }
    found = plan(model, 8, auto_wrap_policy=policies[kind], ignored_modules=[model.blocks[2]], api=api)
    assert [unit.name for unit in found.units] == ["Stack", "blocks.1"]
