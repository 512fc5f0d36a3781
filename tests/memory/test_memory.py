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
from tests.support.beside import APPLY, WRAPPER_FRONTS, sgd
from tests.support.kit import BLOCKS, batch, square_loss, wrapped
from tests.support.models import Stack
from tests.support.steps import SHARDED, recorded

WIDTH = 256


def gathered_bytes(model: nn.Module) -> int:
    return sum(handle.output.nbytes for unit in units_of(model) for handle in unit.param_groups)


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
@WRAPPER_FRONTS
def test_at_most_the_outermost_unit_and_two_others_are_gathered_in_a_step(
    front: str, prefetch: BackwardPrefetch | None, rank: int
) -> None:
    model = APPLY[front](Stack(6, WIDTH), auto_wrap_policy=BLOCKS, backward_prefetch=prefetch)
    root, *blocks = whole_bytes(model)
    limit = root + 2 * max(blocks)
    optimizer = sgd(model)
    for _ in range(3):
        samples = sampled(model, lambda: square_loss(model, batch(rank, width=WIDTH)).backward())
        assert root + max(blocks) <= max(samples) <= limit
        assert gathered_bytes(model) == 0
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_after_a_forward_without_gradients_nothing_is_gathered(strategy: ShardingStrategy, rank: int) -> None:
    model = wrapped(Stack(6, WIDTH), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
    root, *blocks = whole_bytes(model)

    def evaluate() -> None:
        with torch.no_grad():
            model(batch(rank, width=WIDTH))

    for _ in range(3):
        samples = sampled(model, evaluate)
        assert root < max(samples) <= root + 2 * max(blocks)
        assert gathered_bytes(model) == 0


@on_ranks(2)
def test_after_a_training_forward_full_shard_keeps_the_first_and_last_unit_and_shard_grad_op_all(rank: int) -> None:
    for strategy in SHARDED:
        model = wrapped(Stack(3, WIDTH), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
        model(batch(rank, width=WIDTH))
        root, *blocks = whole_bytes(model)
        expected = root + (blocks[-1] if strategy is ShardingStrategy.FULL_SHARD else sum(blocks))
        assert gathered_bytes(model) == expected


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


def settled_bytes(readings: int = 10) -> int:
    """Live bytes once threads of collectives have let go of what they held: the least of several readings."""
    gc.collect()
    lowest = live_bytes()
    for _ in range(readings):
        time.sleep(0.01)
        lowest = min(lowest, live_bytes())
    return lowest


def warm_up(model: nn.Module, x: torch.Tensor) -> None:
    """Steps that make what is made once."""
    for _ in range(3):
        square_loss(model, x).backward()
        model.zero_grad()


def growth(run: Callable[[], Any]) -> int:
    """Bytes by which ``run`` grew the process."""
    before = settled_bytes()
    run()
    return settled_bytes() - before


# Python's own objects and what autograd and the collectives keep for themselves.
SLACK = 250_000


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", SHARDED)
def test_after_backward_the_only_gradients_alive_are_shards(strategy: ShardingStrategy, front: str, rank: int) -> None:
    model = APPLY[front](Stack(6, WIDTH), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
    x = batch(rank, width=WIDTH)
    warm_up(model, x)
    shards = sum(whole_bytes(model)) // 2
    end = growth(lambda: square_loss(model, x).backward())
    assert abs(end - shards) < SLACK, f"{end} bytes alive, shards have {shards}"
    assert min(whole_bytes(model)) > SLACK, "a whole gradient of any unit would show"
    model.zero_grad()


@on_ranks(2)
def test_a_full_shard_step_peaks_at_the_shards_and_a_few_units(rank: int) -> None:
    """Gathered: the root and two units; gradients: the shards, one that is being collected, and for up to two
    reductions in flight and one that begins, what is sent and what is received."""
    model = wrapped(Stack(16, WIDTH), auto_wrap_policy=BLOCKS)
    x = batch(rank, width=WIDTH)
    warm_up(model, x)
    root, *blocks = whole_bytes(model)
    before = settled_bytes()
    samples = sampled(model, lambda: square_loss(model, x).backward(), live_bytes)
    shards = (root + sum(blocks)) // 2
    peak = max(samples) - before
    limit = shards + root + (2 + 1 + 2 * 3) * max(blocks) + SLACK
    assert shards < peak <= limit
    assert limit < 1.1 * (root + sum(blocks)) + SLACK, "far from whole parameters and whole gradients"


@on_ranks(2)
@WRAPPER_FRONTS
def test_accumulation_inside_no_sync_holds_one_whole_gradient(front: str, rank: int) -> None:
    model = APPLY[front](Stack(6, WIDTH), auto_wrap_policy=BLOCKS)
    x = batch(rank, width=WIDTH)
    warm_up(model, x)
    total = sum(whole_bytes(model))

    def accumulate() -> None:
        with model.no_sync():
            square_loss(model, x).backward()

    first = growth(accumulate)
    second = growth(accumulate)
    assert abs(first - total) < SLACK
    assert abs(second) < SLACK
    assert sum(handle.grads.waiting.nbytes for unit in units_of(model) for handle in unit.param_groups) == total
    last = growth(lambda: square_loss(model, x).backward())
    assert abs(last + total - total // 2) < SLACK, "what is left is the shards"


@on_ranks(2)
def test_a_frozen_unit_keeps_no_gradient_bytes(rank: int) -> None:
    module = Stack(4, WIDTH)
    module.blocks.requires_grad_(False)
    model = wrapped(module, auto_wrap_policy=BLOCKS)
    x = batch(rank, width=WIDTH)
    warm_up(model, x)
    root, *blocks = whole_bytes(model)
    end = growth(lambda: square_loss(model, x).backward())
    assert abs(end - root // 2) < SLACK
    assert min(blocks) // 2 > SLACK
