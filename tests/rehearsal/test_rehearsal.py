"""Training steps on a fake accelerator: every access is ordered, no freed memory is used, the host does not wait."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import BackwardPrefetch, MixedPrecision, ShardingStrategy
from tests.rehearsal import seam
from tests.rehearsal.kit import rehearsal, train
from tests.rehearsal.models import (
    BOTH_KINDS,
    EVERY_STRATEGY,
    FOR_GRADIENTS,
    LOW,
    OFFLOAD,
    PAIRS,
    Checkpointed,
    Partial,
    Tied,
    Twice,
    on_device,
)
from tests.support.models import Stack
from tests.support.steps import mesh_for


@BOTH_KINDS
@EVERY_STRATEGY
def test_a_step_of_every_strategy_is_ordered_and_never_stops_the_host(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        train(run, model)
    run.check()


@BOTH_KINDS
@EVERY_STRATEGY
def test_a_step_in_mixed_precision_is_ordered(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(
            sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=LOW, **mesh_for(strategy)
        )
        train(run, model)
    run.check()


@BOTH_KINDS
@EVERY_STRATEGY
def test_accumulated_gradients_are_ordered(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        train(run, model, micro_batches=3)
    run.check()


@BOTH_KINDS
@EVERY_STRATEGY
def test_offloaded_shards_are_copied_from_pinned_memory_and_the_host_waits_for_gradients_only(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(
            Stack(),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            cpu_offload=OFFLOAD,
            **mesh_for(strategy),
        )
        train(run, model)
    run.check(allowed=FOR_GRADIENTS)
    run.check_waits_come_last()


@BOTH_KINDS
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_offloaded_shards_in_mixed_precision_are_ordered(use_orig_params: bool, micro_batches: int) -> None:
    with rehearsal() as run:
        model = run.wrap(Stack(), use_orig_params=use_orig_params, cpu_offload=OFFLOAD, mixed_precision=LOW)
        train(run, model, micro_batches=micro_batches)
    run.check(allowed=FOR_GRADIENTS)
    run.check_waits_come_last()


@BOTH_KINDS
@pytest.mark.parametrize(
    "make", [Twice, functools.partial(Checkpointed, True, (0, 1, 2, 0, 1, 2))], ids=["twice", "twice_reentrant"]
)
def test_offloaded_gradients_that_are_added_up_are_there_first(
    make: Callable[[], nn.Module], use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(make(), use_orig_params=use_orig_params, cpu_offload=OFFLOAD)
        train(run, model)
    run.check(allowed=FOR_GRADIENTS)


@BOTH_KINDS
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_offloaded_gradients_are_clipped_in_order(use_orig_params: bool, norm_type: float) -> None:
    """The host scales them, so it has to know the norm."""
    with rehearsal() as run:
        model = run.wrap(Stack(), use_orig_params=use_orig_params, cpu_offload=OFFLOAD)
        train(run, model, before_step=lambda model: model.clip_grad_norm_(1.0, norm_type))  # type: ignore[operator]
    run.check(allowed=["host wait"])


@BOTH_KINDS
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_hooks", "reentrant"])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_recomputed_activations_are_ordered(
    strategy: ShardingStrategy, use_orig_params: bool, use_reentrant: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(
            on_device(lambda: Checkpointed(use_reentrant)), sharding_strategy=strategy, use_orig_params=use_orig_params
        )
        train(run, model)
    run.check()


OPTIONS: dict[str, dict[str, Any]] = {
    "forward_prefetch": {"forward_prefetch": True},
    "backward_prefetch_post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no_backward_prefetch": {"backward_prefetch": None},
    "limited": {"limit_all_gathers": True},
    "unlimited": {"limit_all_gathers": False},
    "all_low": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "reduced_low": {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
    "one_unit": {"auto_wrap_policy": None},
}


@PAIRS
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_other_options_is_ordered(name: str, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(
            sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy), **OPTIONS[name]
        )
        train(run, model)
    run.check()


@BOTH_KINDS
@pytest.mark.parametrize("make", [Twice, Tied, functools.partial(Stack, 6)], ids=["twice", "tied", "deep"])
def test_other_models_are_ordered(make: Callable[[], nn.Module], use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(make), use_orig_params=use_orig_params)
        train(run, model, micro_batches=2)
    run.check()


def test_frozen_and_unused_units_are_ordered() -> None:
    """The unused unit is asked about, since another rank may have used it: the one value that the host waits for."""
    with rehearsal() as run:
        model = run.wrap(on_device(Partial), use_orig_params=True)
        train(run, model)
    run.check(allowed=[seam.USED_PARAMETERS])


@BOTH_KINDS
def test_gradients_are_clipped_without_a_wait(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, before_step=lambda model: model.clip_grad_norm_(1.0))  # type: ignore[operator]
    run.check()


@BOTH_KINDS
@pytest.mark.parametrize("foreach", [False, True])
def test_adam_is_ordered(use_orig_params: bool, foreach: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, optimizer=functools.partial(torch.optim.AdamW, foreach=foreach))
    run.check()
