"""Pains 22 and 23: outputs that hooks cannot hang on, in-place changes, and activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import Block, Stack, full_params, square_loss, train_on, wrapped
from tests.support.reference import replicated_step
from tests.support.steps import SHARDED, WIDTH, Twin, batch, batches, recorded


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
    twin = Twin.of(Outer(kind), auto_wrap_policy=ModuleWrapPolicy({Inner}), sharding_strategy=strategy)
    for _ in range(2):
        twin.step(lambda model, x: (out := model(x)).logits.pow(2).mean() + out.extra["mean"])


class Caching(nn.Module):
    """Keeps an inner tensor from which the loss is made; its output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = self.block(x)
        return self.cache.detach()


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_loss_made_of_a_cached_inner_tensor_trains_as_the_reference(strategy: ShardingStrategy) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x)
        return model[0].cache.pow(2).mean()

    module = nn.Sequential(Caching(), nn.Linear(WIDTH, 2))
    for param in module[1].parameters():
        param.requires_grad_(False)
    twin = Twin.of(
        module, auto_wrap_policy=ModuleWrapPolicy({Caching}), sharding_strategy=strategy, use_orig_params=True
    )
    for _ in range(2):
        twin.step(loss_of)


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

    twin = Twin.of(Changing(), sharding_strategy=strategy)
    for _ in range(2):
        twin.step()


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
    twin = Twin.of(
        module, auto_wrap_policy=ModuleWrapPolicy({InPlace}), sharding_strategy=strategy, use_orig_params=True
    )
    for _ in range(3):
        twin.step()


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
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("unit", [Recomputing, Block], ids=["inside_a_unit", "around_a_unit"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_inside_or_around_a_unit_equals_the_reference(
    reentrant: bool, unit: type, freeze: bool, strategy: ShardingStrategy
) -> None:
    twin = Twin.of(
        recomputing_stack(reentrant=reentrant, freeze=freeze),
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        sharding_strategy=strategy,
        use_orig_params=True,
    )
    for _ in range(3):
        twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_part_of_a_unit_equals_the_reference(reentrant: bool, use_orig_params: bool) -> None:
    class Partly(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.up, x, use_reentrant=reentrant)
            return x + self.down(torch.tanh(hidden)) * self.up.bias.sum()

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Partly(), Partly(), nn.Linear(WIDTH, 2))
    twin = Twin.of(module, auto_wrap_policy=ModuleWrapPolicy({Partly}), use_orig_params=use_orig_params)
    for _ in range(3):
        twin.step()


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_wrapper_below_a_unit_equals_the_reference(reentrant: bool) -> None:
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT

    def by_hand(module: Stack, **_: Any) -> FSDP:
        for index in range(3):
            module.blocks[index] = wrapped(checkpoint_wrapper(module.blocks[index], checkpoint_impl=impl))
        return wrapped(module)

    twin = Twin.of(Stack(), wrap=by_hand)
    for _ in range(2):
        step_by_order(twin)


def step_by_order(twin: Twin) -> None:
    """The wrapper adds a prefix to names inside, so compare by order."""
    inputs = batches(twin.num_steps)
    twin.num_steps += 1
    twin.optimizer.zero_grad()
    square_loss(twin.model, inputs[dist.get_rank()]).backward()
    replicated_step(twin.plain, twin.plain_optimizer, inputs, square_loss)
    twin.optimizer.step()
    with FSDP.summon_full_params(twin.model, writeback=False):
        ours = [param.detach().clone() for param in twin.model.parameters()]
    assert_close(ours, [param.detach() for param in twin.plain.parameters()], rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_low_precision_equals_no_recomputation(reentrant: bool, rank: int) -> None:
    results = []
    for module in (Stack(), recomputing_stack(reentrant=reentrant, freeze=False)):
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


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_unit_gathers_no_more_often_than_without(reentrant: bool) -> None:
    counts = []
    for module, unit in ((Stack(), Block), (recomputing_stack(reentrant=reentrant, freeze=False), Recomputing)):
        twin = Twin.of(module, auto_wrap_policy=ModuleWrapPolicy({unit}))
        twin.step()
        with recorded() as record:
            square_loss(twin.model, batch(0)).backward()
        counts.append(record.counts())
    assert counts[0] == counts[1]
