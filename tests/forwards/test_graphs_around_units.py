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
from fsdp_flat import fully_shard
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import OWN_PARAMETERS, assert_close, on_ranks
from tests.support.kit import Block, Stack, full_grads, square_loss, wrapped
from tests.support.pairs import CLOSE, KINDS, WIDTH, Pair, batch

STRATEGIES = pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full:FutureWarning")


def strategy(layout: str) -> dict[str, Any]:
    from fsdp_flat import ShardingStrategy

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


@KINDS
@STRATEGIES
@on_ranks(2)
def test_an_input_that_a_unit_changes_in_place_keeps_its_history(layout: str, use_orig_params: bool) -> None:
    def wrap(module: nn.Module, **kwargs: Any) -> FSDP:
        from fsdp_flat.wrap import ModuleWrapPolicy

        return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({InPlace}), **kwargs)

    Pair.of(Residual(), wrap=wrap, use_orig_params=use_orig_params, **strategy(layout)).train(num_steps=3)


class Head(nn.Module):
    """A head on a trunk that another model has too."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


@on_ranks(2)
def test_a_trunk_shared_by_two_roots_and_both_heads_get_their_gradients(rank: int) -> None:
    trunk = Block().double()
    models = [Head(trunk).double(), Head(trunk).double()]
    plain = copy.deepcopy(nn.ModuleList(models))
    models[0].trunk = models[1].trunk = FSDP(trunk, use_orig_params=True)
    sharded = [FSDP(model, use_orig_params=True) for model in models]
    for step in range(2):
        for model in (*sharded, plain):
            model.zero_grad()
        sum(square_loss(model, batch(rank, step + i)) for i, model in enumerate(sharded)).backward()
        for other in range(dist.get_world_size()):
            (sum(square_loss(model, batch(other, step + i)) for i, model in enumerate(plain)) / 2).backward()
        for model, twin in zip(sharded, plain, strict=True):
            expected = {name: param.grad for name, param in twin.named_parameters()}
            assert_close(full_grads(model), expected, **CLOSE, what=f"gradients of step {step}")


# Steps of models that share a trunk: 0 and 1 run forward and backward, "look at 1" is a forward without gradients.
PROGRAMS: dict[str, list[Any]] = {
    "in turns": [0, 1, 0, 0, 1],
    "evaluated": [0, "look at 1", 0, "look at 0", 1],
    "forwards first": [(0, 1), (1, 0), 0],
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("front", ["flat", "orig", "fully_shard"])
@on_ranks(2)
def test_roots_that_share_a_trunk_may_run_in_any_order(front: str, program: str, rank: int) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return fully_shard(module) if front == "fully_shard" else FSDP(module, use_orig_params=front == "orig")

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
        for other in range(dist.get_world_size()):
            (sum(square_loss(plain[index], batch(other, step)) for index in which) / 2).backward()
        # Gradients of all steps are summed.
        for index in (0, 1):
            expected = {name: param.grad for name, param in plain[index].named_parameters()}
            found = full_grads(sharded[index])
            expected = {name: grad for name, grad in expected.items() if grad is not None}
            assert_close({name: found[name] for name in expected}, expected, **CLOSE, what=f"step {step} of {index}")


@KINDS
@STRATEGIES
@on_ranks(2)
def test_a_forward_between_a_gradient_penalty_and_the_backward_frees_nothing_that_is_needed(
    layout: str, use_orig_params: bool
) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor, _rank: int) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return model(x * 2).pow(2).mean() + (grad.norm() - 1).pow(2)

    Pair.of(Stack(), use_orig_params=use_orig_params, **strategy(layout)).train(loss_of, num_steps=2)


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
    def wrap(module: nn.Module, **kwargs: Any) -> FSDP:
        module.block = FSDP(module.block, ignored_states=[module.block.scale], **kwargs)
        return FSDP(module, ignored_states=[module.block.module.scale], **kwargs)

    pair = Pair.of(PassesLeaf(), wrap=wrap, use_orig_params=True)
    for step in range(3):
        square_loss(pair.model, batch(dist.get_rank(), step)).backward()
        torch.optim.SGD(pair.model.parameters(), lr=0.1).step()
        pair.model.zero_grad()
    assert not pair.model.block.module.scale._backward_hooks


def clear(pair: Pair, part: str) -> None:
    """Accumulate once inside ``no_sync``, then drop the gradients with ``part`` in their names."""
    with pair.model.no_sync():
        square_loss(pair.model, batch(dist.get_rank())).backward()
    pair.follow()
    for model in (pair.model, pair.plain):
        for name, param in model.named_parameters():
            if part in name:
                param.grad = None


@on_ranks(2)
def test_gradients_of_one_unit_cleared_inside_no_sync_are_gone() -> None:
    pair = Pair.of(Stack(), use_orig_params=True)
    clear(pair, "blocks.1")
    pair.backward(step=1)
    pair.check_gradients("gradients after those of a block were cleared")


@on_ranks(2)
def test_a_part_of_a_units_gradients_may_be_cleared_inside_no_sync_wherever_the_elements_are() -> None:
    pair = Pair.of(Stack(), use_orig_params=True)
    clear(pair, "bias")
    pair.backward(step=1)
    pair.check_gradients("gradients after those of biases were cleared")


class Recycling(Stack):
    """The blocks run without gradients first, as in models that recycle their output."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            recycled = super().features(x)
        return super().features(x + recycled)


@on_ranks(2)
def test_a_pass_without_gradients_before_the_real_one_holds_no_unit_longer(rank: int) -> None:
    pair = Pair.of(Recycling(), use_orig_params=True)
    pair.train()
    step = pair.model._fsdp_step()
    step.trace = trace = []
    square_loss(pair.model, batch(rank)).backward()
    last, before = ("blocks.2", "blocks.1") if len(pair.plain.blocks) > 2 else ("blocks.1", "blocks.0")
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


@KINDS
@on_ranks(2)
def test_a_first_unit_whose_parameters_only_some_ranks_use_gets_the_mean_with_zeros(use_orig_params: bool) -> None:
    def wrap(module: nn.Module, **kwargs: Any) -> FSDP:
        from fsdp_flat.wrap import ModuleWrapPolicy

        return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Sometimes, Block}), **kwargs)

    pair = Pair.of(FirstSometimes(), wrap=wrap, use_orig_params=use_orig_params)
    for step in range(3):
        uses = [(rank + step) % 2 == 0 for rank in range(2)]
        pair.backward(lambda model, x, rank, uses=uses: model(x, uses[rank]).pow(2).mean(), step)
        pair.check_gradients(f"gradients of step {step}")
        pair.step(lr=0.02)


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
    pair = Pair.of(model, use_orig_params=True)
    pair.train()
    step = pair.model._fsdp_step()
    step.trace = trace = []
    square_loss(pair.model, batch(rank)).backward()
    names = [f"blocks.{index}" for index in range(len(pair.plain.blocks))]
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


@KINDS
@STRATEGIES
@pytest.mark.parametrize("use_reentrant", [None, False], ids=["kept", "recomputed"])
@on_ranks(2)
def test_a_gradient_that_a_model_takes_in_its_forward_is_recomputed_too(
    layout: str, use_orig_params: bool, use_reentrant: bool | None
) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        if use_reentrant is None:
            return model(x).square().mean()
        out: torch.Tensor = checkpoint(model, x, use_reentrant=use_reentrant)
        return out.square().mean()

    policy = ModuleWrapPolicy({Energy})
    options = {"auto_wrap_policy": policy, "use_orig_params": use_orig_params, **strategy(layout)}
    pair = Pair.of(nn.Sequential(Force(), nn.Linear(WIDTH, 2)), wrap=wrapped, **options)
    pair.train(loss_of, num_steps=2)
