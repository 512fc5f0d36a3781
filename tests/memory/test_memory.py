"""Bytes alive at named points of a step."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import BackwardPrefetch, ShardingStrategy
from fsdp_flat.core import units_of
from tests.support import on_ranks
from tests.support.kit import Block, Stack, square_loss
from tests.support.steps import SHARDED, Twin, batch, recorded

WIDTH = 256


def gathered_bytes(model: nn.Module) -> int:
    return sum(handle.buffer.nbytes for unit in units_of(model) for handle in unit.param_groups)


def whole_bytes(model: nn.Module) -> list[int]:
    """Gathered bytes of each unit, the root first."""
    return [sum(4 * handle.layout.numel for handle in unit.param_groups) for unit in units_of(model)]


def sampled(model: nn.Module, run: Callable[[], None], measure: Callable[[], int] | None = None) -> list[int]:
    """Gathered bytes, or what ``measure`` says, at every collective, module call and gradient while ``run`` runs."""
    samples: list[int] = []

    def sample(*_: Any) -> None:
        samples.append(gathered_bytes(model) if measure is None else measure())

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
def test_after_a_training_forward_full_shard_keeps_the_first_and_last_unit_and_shard_grad_op_all(rank: int) -> None:
    for strategy in SHARDED:
        twin = Twin.of(Stack(3, WIDTH), sharding_strategy=strategy)
        twin.model(batch(rank, width=WIDTH))
        root, *blocks = whole_bytes(twin.model)
        expected = root + (blocks[-1] if strategy is ShardingStrategy.FULL_SHARD else sum(blocks))
        assert gathered_bytes(twin.model) == expected


class MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
        )
    ]


def live_bytes() -> int:
    """Bytes that this process has from malloc now, whichever thread asked for them (gloo's threads free tensors)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("needs glibc's mallinfo2")
    mallinfo.restype = MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def settled_bytes() -> int:
    """Live bytes once threads of collectives have let go of what they held."""
    gc.collect()
    lowest = live_bytes()
    for _ in range(10):
        time.sleep(0.01)
        lowest = min(lowest, live_bytes())
    return lowest


def warm_up(twin: Twin, x: torch.Tensor) -> None:
    """Steps that make what is made once."""
    for _ in range(3):
        square_loss(twin.model, x).backward()
        twin.optimizer.zero_grad()


def growth(run: Callable[[], Any]) -> int:
    """Bytes by which ``run`` grew the process."""
    before = settled_bytes()
    run()
    return settled_bytes() - before


# Python's own objects and what autograd and the collectives keep for themselves.
SLACK = 250_000


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
def test_after_backward_the_only_gradients_alive_are_shards(
    strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    twin = Twin.of(Stack(6, WIDTH), sharding_strategy=strategy, use_orig_params=use_orig_params)
    x = batch(rank, width=WIDTH)
    warm_up(twin, x)
    shards = sum(whole_bytes(twin.model)) // 2
    end = growth(lambda: square_loss(twin.model, x).backward())
    assert abs(end - shards) < SLACK, f"{end} bytes alive, shards have {shards}"
    assert min(whole_bytes(twin.model)) > SLACK, "a whole gradient of any unit would show"
    twin.optimizer.zero_grad()


@on_ranks(2)
def test_a_full_shard_step_peaks_at_the_shards_and_a_few_units(rank: int) -> None:
    """Gathered: the root and two units; gradients: the shards, one that is being collected, and for up to two
    reductions in flight and one that begins, what is sent and what is received."""
    twin = Twin.of(Stack(16, WIDTH))
    x = batch(rank, width=WIDTH)
    warm_up(twin, x)
    root, *blocks = whole_bytes(twin.model)
    before = settled_bytes()
    samples = sampled(twin.model, lambda: square_loss(twin.model, x).backward(), live_bytes)
    shards = (root + sum(blocks)) // 2
    peak = max(samples) - before
    limit = shards + root + (2 + 1 + 2 * 3) * max(blocks) + SLACK
    assert shards < peak <= limit
    assert limit < 1.1 * (root + sum(blocks)) + SLACK, "far from whole parameters and whole gradients"


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_accumulation_inside_no_sync_holds_one_whole_gradient(use_orig_params: bool, rank: int) -> None:
    twin = Twin.of(Stack(6, WIDTH), use_orig_params=use_orig_params)
    x = batch(rank, width=WIDTH)
    warm_up(twin, x)
    total = sum(whole_bytes(twin.model))

    def accumulate() -> None:
        with twin.model.no_sync():
            square_loss(twin.model, x).backward()

    first = growth(accumulate)
    second = growth(accumulate)
    assert abs(first - total) < SLACK
    assert abs(second) < SLACK
    assert sum(handle.grads._buffer.nbytes for unit in units_of(twin.model) for handle in unit.param_groups) == total
    last = growth(lambda: square_loss(twin.model, x).backward())
    assert abs(last + total - total // 2) < SLACK, "what is left is the shards"


@on_ranks(2)
def test_a_frozen_unit_keeps_no_gradient_bytes(rank: int) -> None:
    module = Stack(4, WIDTH)
    module.blocks.requires_grad_(False)
    twin = Twin.of(module)
    x = batch(rank, width=WIDTH)
    warm_up(twin, x)
    root, *blocks = whole_bytes(twin.model)
    end = growth(lambda: square_loss(twin.model, x).backward())
    assert abs(end - root // 2) < SLACK
    assert min(blocks) // 2 > SLACK
    assert isinstance(twin.plain.blocks[0], Block)
