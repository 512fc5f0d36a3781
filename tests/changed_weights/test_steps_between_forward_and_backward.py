"""Optimizers that step between a forward and its backward, without a change of the weights that the forward used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.composable import fully_shard
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, on_ranks

INPUT = torch.arange(8.0).view(2, 4) / 8


class Heads(nn.Module):
    """An actor and a critic, of which a loss uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        self.actor = nn.Linear(4, 3)
        self.critic = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.critic(x)


def wrapped_as(how: str) -> Callable[[nn.Module], nn.Module]:
    if how == "fully_shard":
        return lambda model: fully_shard(model)
    strategy, _, kind = how.partition(" ")
    policy = ModuleWrapPolicy({nn.Linear})
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": kind == "originals"}
    return lambda model: FSDP(model, auto_wrap_policy=policy, **options)


HOWS = [
    *(f"{name} {kind}" for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for kind in ("originals", "flat")),
    "fully_shard",
]


def backward_in_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = sum(each.square().sum() for each in model(INPUT))

    def closure() -> Any:
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)


def a_step_without_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = sum(each.square().sum() for each in model(INPUT))
    optimizer.step()
    loss.backward()
    optimizer.step()


def two_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    actor, _ = model(INPUT)
    _, critic = model(INPUT)
    critic.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    actor.square().sum().backward()
    optimizer.step()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("program", [backward_in_the_step, a_step_without_gradients, two_losses])
def test_a_backward_after_a_step_that_did_not_change_its_weights_is_right(
    program: Callable[[nn.Module, torch.optim.Optimizer], None], how: str
) -> None:
    outputs = []
    for wrap in (lambda model: model, wrapped_as(how)):
        model = wrap(Heads())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            program(model, optimizer)
            optimizer.zero_grad()
        with torch.no_grad():
            outputs.append(model(INPUT))
    assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
