"""Graphs that go through units in unusual ways: inputs changed in place, shared trunks, penalties, passed-on leaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, fully_shard
from tests.support import OWN_PARAMETERS, assert_close, on_ranks
from tests.support.beside import CLOSE, FRONTS, WIDTH, WRAPPER_FRONTS, Beside, average_gradients, batch
from tests.support.kit import full_grads, square_loss
from tests.support.models import Block, Stack

STRATEGIES = pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full:FutureWarning")


def strategy(layout: str) -> dict[str, Any]:
    return {"sharding_strategy": ShardingStrategy[layout]}


class InPlace(Block):
    """A block that changes its input, as a pre-activation with ``inplace=True`` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.relu_(x))


class Residual(nn.Module):
    """The input of a unit is used again after the unit has changed it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([InPlace(), InPlace()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + x
        return x


@WRAPPER_FRONTS
@STRATEGIES
@on_ranks(2)
def test_an_input_that_a_unit_changes_in_place_keeps_its_history(layout: str, front: str) -> None:
    Beside(Residual(), front, units=(InPlace,), **strategy(layout)).train(num_steps=3)


class Head(nn.Module):
    """A head on a trunk that another model has too."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


# Steps of models that share a trunk: 0 and 1 run forward and backward, "look at 1" is a forward without gradients.
PROGRAMS: dict[str, list[Any]] = {
    "in turns": [0, 1, 0, 0, 1],
    "evaluated": [0, "look at 1", 0, "look at 0", 1],
    "forwards first": [(0, 1), (1, 0), 0],
}


@pytest.mark.parametrize("program", PROGRAMS)
@FRONTS
@on_ranks(2)
def test_roots_that_share_a_trunk_may_run_in_any_order(front: str, program: str, rank: int) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return fully_shard(module) if front == "fully_shard" else FSDP(module, use_orig_params=front == "originals")

    trunk = Block().double()
    models = [Head(trunk).double(), Head(trunk).double()]
    plain = copy.deepcopy(nn.ModuleList(models))
    models[0].trunk = models[1].trunk = wrap(trunk)
    sharded = [wrap(model) for model in models]
    for step, ran in enumerate(PROGRAMS[program]):
        if isinstance(ran, str):
            with torch.no_grad():
                sharded[int(ran[-1])](batch(rank, step))
            continue
        which = ran if isinstance(ran, tuple) else (ran,)
        for loss in [square_loss(sharded[index], batch(rank, step)) for index in which]:
            loss.backward()
        sum(square_loss(plain[index], batch(rank, step)) for index in which).backward()
        average_gradients(plain)
        # Gradients of all steps are summed.
        for index in (0, 1):
            expected = {name: param.grad for name, param in plain[index].named_parameters()}
            found = full_grads(sharded[index])
            expected = {name: grad for name, grad in expected.items() if grad is not None}
            assert_close({name: found[name] for name in expected}, expected, **CLOSE, what=f"step {step} of {index}")


@WRAPPER_FRONTS
@STRATEGIES
@on_ranks(2)
def test_a_forward_between_a_gradient_penalty_and_the_backward_frees_nothing_that_is_needed(
    layout: str, front: str
) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return model(x * 2).pow(2).mean() + (grad.norm() - 1).pow(2)

    Beside(Stack(), front, **strategy(layout)).train(loss_of, num_steps=2)


class WithLeaf(Block):
    """A block that returns a leaf beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.scale


class PassesLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = WithLeaf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, scale = self.block(x)
        return x * scale


@OWN_PARAMETERS
@on_ranks(2)
def test_a_leaf_among_the_outputs_of_a_unit_does_not_bring_back_the_step_before() -> None:
    def wrap(module: nn.Module, apply: Any) -> Any:
        module.block = apply(module.block, ignored_states=[module.block.scale])
        return apply(module, ignored_states=[module.block.module.scale])

    beside = Beside(PassesLeaf(), "originals", shard=wrap)
    for step in range(3):
        square_loss(beside.ours, batch(dist.get_rank(), step)).backward()
        torch.optim.SGD(beside.ours.parameters(), lr=0.1).step()
        beside.ours.zero_grad()
    assert not beside.ours.block.module.scale._backward_hooks


class Recycling(Stack):
    """The blocks run without gradients first, as in models that recycle their output."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            recycled = super().features(x)
        return super().features(x + recycled)


@on_ranks(2)
def test_a_pass_without_gradients_before_the_real_one_holds_no_unit_longer(rank: int) -> None:
    beside = Beside(Recycling(), "originals")
    beside.train()
    step = beside.ours._fsdp_step()
    step.trace = trace = []
    square_loss(beside.ours, batch(rank)).backward()
    last, before = ("blocks.2", "blocks.1") if len(beside.plain.blocks) > 2 else ("blocks.1", "blocks.0")
    backward = trace[trace.index(("pre_backward", last)) :]
    assert backward.index(("reduce_scatter", last)) < backward.index(("reduce_scatter", before))
    assert backward.index(("reshard", last)) < backward.index(("pre_backward", before)) + 3
    assert [event for event in backward if event == ("unshard", last)] == []


class Sometimes(Block):
    """Uses its parameters on some ranks only, and its input needs no gradient."""

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        return super().forward(x) if use else x


class FirstSometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maybe = Sometimes()
        self.block = Block()

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.block(self.maybe(x, use))


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_first_unit_whose_parameters_only_some_ranks_use_gets_the_mean_with_zeros(front: str) -> None:
    beside = Beside(FirstSometimes(), front, units=(Sometimes, Block))
    for step in range(3):
        beside.train(lambda model, x, step=step: model(x, (dist.get_rank() + step) % 2 == 0).pow(2).mean())


@on_ranks(2)
def test_a_frozen_unit_in_a_reentrant_checkpoint_is_freed_before_the_unit_below_it_runs_backward(rank: int) -> None:
    class Recomputed(Stack):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    model = Recomputed()
    model.blocks.requires_grad_(False)
    beside = Beside(model, "originals")
    beside.train()
    step = beside.ours._fsdp_step()
    step.trace = trace = []
    square_loss(beside.ours, batch(rank)).backward()
    names = [f"blocks.{index}" for index in range(len(beside.plain.blocks))]
    backward = trace[trace.index(("pre_backward", names[-1])) :]
    assert backward.index(("reshard", names[-1])) < backward.index(("pre_backward", names[-2]))


class Energy(nn.Module):
    """One block and its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).sum()


class Force(nn.Module):
    """The gradient of an energy, which a unit computes in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return force


@WRAPPER_FRONTS
@STRATEGIES
@pytest.mark.parametrize("use_reentrant", [None, False], ids=["kept", "recomputed"])
@on_ranks(2)
def test_a_gradient_that_a_model_takes_in_its_forward_is_recomputed_too(
    layout: str, front: str, use_reentrant: bool | None
) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if use_reentrant is None:
            return model(x).square().mean()
        out: torch.Tensor = checkpoint(model, x, use_reentrant=use_reentrant)
        return out.square().mean()

    model = nn.Sequential(Force(), nn.Linear(WIDTH, 2))
    Beside(model, front, units=(Energy,), **strategy(layout)).train(loss_of, num_steps=2)
