"""Recomputed activations change neither gradients nor the number of gathers, wherever the checkpoints are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision
from fsdp_flat.composable import trace
from tests.support import on_ranks
from tests.support.models import NormedBlock
from tests.support.surface_models import assert_near, batches, count_events, mean_loss, sharded, small_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning"),
    # torch says so of a re-entrant checkpoint inside another one, whose first forward runs without gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
Wrap = Callable[[nn.Module], nn.Module]
Build = Callable[[nn.Module, Wrap, dict[str, Any]], FSDP]


def before_wrapping(model: nn.Module, wrap: Wrap, options: dict[str, Any]) -> FSDP:
    """The unit is inside the checkpoint: the policy wraps blocks that checkpoint wrappers hold."""
    apply(model, wrap, NormedBlock)
    return sharded(model, **options)


def after_wrapping(model: nn.Module, wrap: Wrap, options: dict[str, Any]) -> FSDP:
    """The checkpoint is inside the unit, as Lightning and accelerate do it."""
    wrapped = sharded(model, **options)
    apply(wrapped, wrap, NormedBlock)
    return wrapped


def outside_of_each_unit(model: nn.Module, wrap: Wrap, options: dict[str, Any]) -> FSDP:
    """Checkpoints around units that exist already."""
    for index in (1, 2):
        model[index] = wrap(sharded(model[index], classes=(), **options))
    return sharded(model, classes=(), **options)


def several_in_one_unit(model: nn.Module, wrap: Wrap, options: dict[str, Any]) -> FSDP:
    """One unit, in which each block is a checkpoint."""
    apply(model, wrap, NormedBlock)
    return sharded(model, classes=(), **options)


def parts_of_a_unit(model: nn.Module, wrap: Wrap, options: dict[str, Any]) -> FSDP:
    """Checkpoints that cover single layers of a unit, two of the three."""
    for block in model[1:3]:
        block.norm, block.up = wrap(block.norm), wrap(block.up)
    return sharded(model, **options)


def two_units_in_one(model: nn.Module, wrap: Wrap, options: dict[str, Any]) -> FSDP:
    """One checkpoint around several units."""
    inner = nn.Sequential(*(sharded(block, classes=(), **options) for block in model[1:3]))
    return sharded(nn.Sequential(model[0], wrap(inner), model[3]), classes=(), **options)


def nested(model: nn.Module, wrap: Wrap, options: dict[str, Any]) -> FSDP:
    """A checkpoint inside a unit inside a checkpoint."""
    for index in (1, 2):
        model[index].up = wrap(model[index].up)
    return outside_of_each_unit(model, wrap, options)


PLACES: dict[str, Build] = {
    place.__name__: place
    for place in (
        before_wrapping,
        after_wrapping,
        outside_of_each_unit,
        several_in_one_unit,
        parts_of_a_unit,
        two_units_in_one,
        nested,
    )
}


def apply(model: nn.Module, wrap: Wrap, kind: type[nn.Module]) -> None:
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, kind))


def freeze_some(model: nn.Module) -> None:
    """One whole block, and a layer of the other."""
    model[1].requires_grad_(False)
    model[2].up.requires_grad_(False)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.4},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "frozen": {"frozen": True},
    "frozen, bf16, dropout": {
        "frozen": True,
        "dropout": 0.4,
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True),
    },
}


def run(build: Build, wrap: Wrap, options: dict[str, Any], rank: int, num_ranks: int) -> Any:
    """Gradients by position, and gathers by unit, of two backwards."""
    options = dict(options)
    plain = small_model(dropout=options.pop("dropout", 0.0))
    if options.pop("frozen", False):
        freeze_some(plain)
    model = build(plain, wrap, options)
    torch.manual_seed(rank)
    losses = []
    with trace(model) as events:
        for step in range(2):
            loss = mean_loss(model, batches(num_ranks, step=step)[rank])
            loss.backward()
            losses.append(loss.detach())
        gathers = sorted(count_events(events, "unshard").values())
        assert not any(unit.param_groups[0].output.nbytes for unit in model._unit.step.units if unit.needs_all_gather)
    grads = {i: param.grad for i, param in enumerate(model.parameters()) if param.grad is not None and param.numel()}
    return {"losses": dict(enumerate(losses)), "gradients": grads}, gathers


def check(place: str, impl: str, options: dict[str, Any], rank: int, num_ranks: int) -> None:
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl[impl])
    got, gathers = run(PLACES[place], wrap, options, rank, num_ranks)
    expected, gathers_without = run(PLACES[place], lambda module: module, options, rank, num_ranks)
    assert expected["gradients"]
    assert_near(got, expected, 1e-6, "checkpointed run")
    assert gathers == gathers_without, "gathers of each unit in two steps"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", ["NO_REENTRANT", "REENTRANT"])
@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_a_checkpointed_run_equals_the_plain_one_gather_for_gather(
    place: str, impl: str, variant: str, rank: int, num_ranks: int
) -> None:
    check(place, impl, {"use_orig_params": True, **VARIANTS[variant]}, rank, num_ranks)


@pytest.mark.parametrize("variant", ["plain", "dropout"])
@pytest.mark.parametrize("impl", ["NO_REENTRANT", "REENTRANT"])
@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_the_same_holds_for_flat_parameters(place: str, impl: str, variant: str, rank: int, num_ranks: int) -> None:
    check(place, impl, {"use_orig_params": False, **VARIANTS[variant]}, rank, num_ranks)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("impl", ["NO_REENTRANT", "REENTRANT"])
@pytest.mark.parametrize("place", ["after_wrapping", "outside_of_each_unit", "parts_of_a_unit"])
@on_ranks(2)
def test_the_same_holds_for_other_strategies(place: str, impl: str, strategy: str, rank: int, num_ranks: int) -> None:
    check(place, impl, {"use_orig_params": True, "strategy": strategy}, rank, num_ranks)


@pytest.mark.parametrize("impl", ["NO_REENTRANT", "REENTRANT"])
@on_ranks(2)
def test_full_sharding_with_checkpoints_gathers_each_block_but_the_last_twice_a_step(
    impl: str, rank: int, num_ranks: int
) -> None:
    model = after_wrapping(
        small_model(), partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl[impl]), {"use_orig_params": True}
    )
    for _ in range(2):
        with trace(model) as events:
            mean_loss(model, batches(num_ranks)[rank]).backward()
        # Forward, and recompute with backward; the outermost unit and the last stay after forward.
        assert count_events(events, "unshard") == {"Sequential": 1, "1": 2, "2": 1}
