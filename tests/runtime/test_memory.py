"""Bytes alive at named points of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import BackwardPrefetch, ShardingStrategy
from fsdp_flat.runtime import units_of
from tests.runtime.kit import SHARDED, Block, Stack, Twin, batch, recorded, square_loss
from tests.support import on_ranks

WIDTH = 64


def gathered_bytes(model: nn.Module) -> int:
    return sum(handle.buffer.nbytes for unit in units_of(model) for handle in unit.handles)


def whole_bytes(model: nn.Module) -> list[int]:
    """Gathered bytes of each unit, the root first."""
    return [sum(4 * handle.layout.numel for handle in unit.handles) for unit in units_of(model)]


def sampled(model: nn.Module, run: Callable[[], None]) -> list[int]:
    """Gathered bytes at every collective, module call and gradient while ``run`` runs."""
    samples: list[int] = []

    def sample(*_: Any) -> None:
        samples.append(gathered_bytes(model))

    def after_forward(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        sample()
        if output.requires_grad:
            output.register_hook(sample)

    removers = []
    for module in model.modules():
        removers.append(module.register_forward_pre_hook(sample))
        removers.append(module.register_forward_hook(after_forward))
    with recorded(on_call=sample):
        run()
    for remover in removers:
        remover.remove()
    return samples


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_at_most_the_outermost_unit_and_two_others_are_gathered_in_a_step(
    use_orig_params: bool, prefetch: BackwardPrefetch | None, rank: int
) -> None:
    twin = Twin.of(Stack(6, WIDTH), backward_prefetch=prefetch, use_orig_params=use_orig_params)
    root, *blocks = whole_bytes(twin.model)
    limit = root + 2 * max(blocks)
    for _ in range(3):
        samples = sampled(twin.model, lambda: square_loss(twin.model, batch(rank, width=WIDTH)).backward())
        assert root + max(blocks) <= max(samples) <= limit
        assert gathered_bytes(twin.model) == 0
        twin.optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_after_a_forward_without_gradients_nothing_is_gathered(strategy: ShardingStrategy, rank: int) -> None:
    twin = Twin.of(Stack(6, WIDTH), sharding_strategy=strategy)
    root, *blocks = whole_bytes(twin.model)

    def evaluate() -> None:
        with torch.no_grad():
            twin.model(batch(rank, width=WIDTH))

    for _ in range(3):
        samples = sampled(twin.model, evaluate)
        assert root < max(samples) <= root + 2 * max(blocks)
        assert gathered_bytes(twin.model) == 0


@on_ranks(2)
def test_after_a_training_forward_full_shard_keeps_the_outermost_unit_and_shard_grad_op_everything(rank: int) -> None:
    for strategy in SHARDED:
        twin = Twin.of(Stack(3, WIDTH), sharding_strategy=strategy)
        twin.model(batch(rank, width=WIDTH))
        root, *blocks = whole_bytes(twin.model)
        expected = root if strategy is ShardingStrategy.FULL_SHARD else root + sum(blocks)
        assert gathered_bytes(twin.model) == expected


def growth(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of CPU memory by which ``run`` grew the process at its end, and at its peak."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return now, peak


SLACK = 20_000


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
def test_after_backward_the_only_gradients_alive_are_shards(
    strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    twin = Twin.of(Stack(6, WIDTH), sharding_strategy=strategy, use_orig_params=use_orig_params)
    x = batch(rank, width=WIDTH)
    square_loss(twin.model, x).backward()
    twin.optimizer.zero_grad()
    shards = sum(whole_bytes(twin.model)) // 2
    end, peak = growth(lambda: square_loss(twin.model, x).backward())
    assert abs(end - shards) < SLACK, f"{end} bytes alive, shards have {shards}"
    assert peak > end
    assert SLACK < min(whole_bytes(twin.model)), "a whole gradient of any unit would show"
    twin.optimizer.zero_grad()


@on_ranks(2)
def test_a_full_shard_step_peaks_at_the_shards_and_a_few_units(rank: int) -> None:
    """Gathered: the root and two units; gradients: the shards, and per reduction in flight what is sent and received."""
    twin = Twin.of(Stack(12, WIDTH))
    x = batch(rank, width=WIDTH)
    square_loss(twin.model, x).backward()
    twin.optimizer.zero_grad()
    root, *blocks = whole_bytes(twin.model)
    end, peak = growth(lambda: square_loss(twin.model, x).backward())
    shards = (root + sum(blocks)) // 2
    assert abs(end - shards) < SLACK
    # Up to two reductions in flight, one that begins and one gradient that is being collected.
    assert peak <= shards + root + (2 + 2 * 3 + 1) * max(blocks)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_accumulation_inside_no_sync_holds_one_whole_gradient(use_orig_params: bool, rank: int) -> None:
    twin = Twin.of(Stack(6, WIDTH), use_orig_params=use_orig_params)
    x = batch(rank, width=WIDTH)
    square_loss(twin.model, x).backward()
    twin.optimizer.zero_grad()
    total = sum(whole_bytes(twin.model))

    def accumulate() -> None:
        with twin.model.no_sync():
            square_loss(twin.model, x).backward()

    first, _ = growth(accumulate)
    second, _ = growth(accumulate)
    assert abs(first - total) < SLACK
    assert abs(second) < SLACK
    assert sum(handle._window.nbytes for unit in units_of(twin.model) for handle in unit.handles) == total
    last, _ = growth(lambda: square_loss(twin.model, x).backward())
    assert abs(last + total - total // 2) < SLACK, "what is left is the shards"


@on_ranks(2)
def test_a_frozen_unit_keeps_no_gradient_bytes(rank: int) -> None:
    module = Stack(4, WIDTH)
    module.blocks.requires_grad_(False)
    twin = Twin.of(module)
    x = batch(rank, width=WIDTH)
    square_loss(twin.model, x).backward()
    twin.optimizer.zero_grad()
    root, *blocks = whole_bytes(twin.model)
    end, _ = growth(lambda: square_loss(twin.model, x).backward())
    assert abs(end - root // 2) < SLACK
    assert SLACK < min(blocks) // 2
    assert isinstance(twin.plain.blocks[0], Block)
