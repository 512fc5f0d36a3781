"""Pains 22 and 23: outputs that hooks cannot hang on, in-place changes, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch
from tests.support.kit import full_params, train_on, wrapped
from tests.support.models import Block, Stack
from tests.support.steps import SHARDED


@dataclass
class Result:
    logits: torch.Tensor
    extra: dict[str, torch.Tensor]


class Plain:
    """A result class that is neither a dataclass nor a container."""

    def __init__(self, logits: torch.Tensor, extra: dict[str, torch.Tensor]) -> None:
        self.logits = logits
        self.extra = extra


class Inner(nn.Module):
    """A unit whose output is an object of the caller's class."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.block = Block()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        out = self.block(x)
        return self.kind(out, {"mean": out.mean()})


class Outer(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner = Inner(kind)
        self.last = Inner(kind)

    def forward(self, x: torch.Tensor) -> Any:
        result = self.inner(x)
        return self.last(result.logits * result.extra["mean"])


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("kind", [Result, Plain])
def test_an_output_in_a_dataclass_or_object_trains_as_the_reference(kind: type, strategy: ShardingStrategy) -> None:
    beside = Beside(Outer(kind), units=(Inner,), sharding_strategy=strategy)
    for _ in range(2):
        beside.train(lambda model, x: (out := model(x)).logits.pow(2).mean() + out.extra["mean"])


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("change", ["whole", "view"])
def test_an_in_place_change_of_a_units_output_trains_as_the_reference(change: str, strategy: ShardingStrategy) -> None:
    class Changing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                if change == "view":
                    x.view(-1).add_(1)
                else:
                    x.mul_(2)
            return self.head(x)

    beside = Beside(Changing(), sharding_strategy=strategy)
    beside.train(num_steps=2)


class InPlace(nn.Module):
    """Changes its input, as ``nn.ReLU(inplace=True)`` at its start does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.tanh_()
        return x + self.layer(x)


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("with_unused", [False, True])
def test_a_unit_that_changes_its_input_in_place_trains_as_the_reference(
    with_unused: bool, strategy: ShardingStrategy
) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), InPlace(), InPlace(), nn.Linear(WIDTH, 2))
    if not with_unused:
        del module[1].unused
        del module[2].unused
    beside = Beside(module, "originals", units=(InPlace,), sharding_strategy=strategy)
    beside.train(num_steps=3)


# -- activation checkpointing ----------------------------------------------------------------------------------------


class Recomputing(nn.Module):
    """A block that recomputes its activations in backward; what it wraps may be a unit."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def recomputing_stack(*, reentrant: bool, freeze: bool) -> Stack:
    module = Stack()
    for index in range(3):
        module.blocks[index] = Recomputing(module.blocks[index], reentrant=reentrant)
    if freeze:
        module.blocks[1].requires_grad_(False)
        module.blocks[2].inner.up.requires_grad_(False)
    return module


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_part_of_a_unit_equals_the_reference(reentrant: bool, front: str) -> None:
    class Partly(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.up, x, use_reentrant=reentrant)
            return x + self.down(torch.tanh(hidden)) * self.up.bias.sum()

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Partly(), Partly(), nn.Linear(WIDTH, 2))
    beside = Beside(module, front, units=(Partly,))
    beside.train(num_steps=3)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_wrapper_below_a_unit_equals_the_reference(reentrant: bool) -> None:
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT

    def by_hand(module: Stack, apply: Callable[..., Any]) -> FSDP:
        for index in range(3):
            module.blocks[index] = apply(checkpoint_wrapper(module.blocks[index], checkpoint_impl=impl))
        return apply(module)

    Beside(Stack(), shard=by_hand).train(num_steps=2)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_low_precision_equals_no_recomputation(reentrant: bool, rank: int) -> None:
    results = []
    for module in (Stack().double(), recomputing_stack(reentrant=reentrant, freeze=False).double()):
        torch.manual_seed(1)
        with torch.no_grad():
            for param in module.parameters():
                param.normal_()
        model = wrapped(
            module, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=MixedPrecision(torch.bfloat16)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train_on(model, optimizer, [batch(rank, step) for step in range(2)])
        results.append(list(full_params(model).values()))
    assert_equal(results[1], results[0])
