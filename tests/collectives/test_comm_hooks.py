"""Communication hooks of FSDP1, the caller's own and torch's, replace the reduction of gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp_flat import ShardingStrategy
from fsdp_flat.core import units_of
from tests.support import on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside, of_stack
from tests.support.models import Stack

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
STRATEGIES = pytest.mark.parametrize("strategy", [each.name for each in ShardingStrategy])


class HookCalls:
    """A hook of the caller's own, as FSDP1's documentation describes it, that notes its arguments."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = []

    def __call__(self, state: Any, grad: torch.Tensor, out: torch.Tensor | None = None) -> None:
        assert state == "state"
        self.calls.append((tuple(grad.shape), None if out is None else tuple(out.shape)))
        size = dist.get_world_size(self.group)
        dist.all_reduce(grad, group=self.group)
        grad.div_(size)
        if out is not None:
            out.copy_(grad.chunk(size)[dist.get_rank(self.group)])


@WRAPPER_FRONTS
@STRATEGIES
@on_ranks(2, 4)
def test_a_comm_hook_replaces_the_reduction_over_the_shard_axis(
    strategy: str, front: str, rank: int, num_ranks: int
) -> None:
    beside = of_stack(front, strategy)
    model = beside.ours
    hook = HookCalls(model.process_group)
    model.register_comm_hook("state", hook)
    for _ in range(2):
        beside.backward()
    flat_sizes = [unit.param_groups[0].layout for unit in units_of(model)]
    size = 1 if strategy == "NO_SHARD" else dist.get_world_size(model.process_group)
    assert sorted(hook.calls) == sorted(
        [((layout.numel,), None if size == 1 else (layout.numel // size,)) for layout in flat_sizes] * 2
    )
    beside.check_gradients()


@WRAPPER_FRONTS
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
@STRATEGIES
@on_ranks(2)
def test_built_in_compression_hooks_run_on_gloo(
    strategy: str, name: str, front: str, rank: int, num_ranks: int
) -> None:
    beside = of_stack(front, strategy)
    model = beside.ours
    model.register_comm_hook(None, getattr(default_hooks, name))
    beside.backward()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float64}
    beside.check_gradients(rtol=1e-2, atol=1e-3)
    with pytest.raises(AssertionError, match="differ"):  # it did compress
        beside.check_gradients(rtol=1e-6, atol=1e-7)


@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy, name", [("NO_SHARD", "allreduce_hook"), ("FULL_SHARD", "reduce_scatter_hook")])
@on_ranks(2, 4)
def test_built_in_uncompressed_hooks_give_the_mean(
    strategy: str, name: str, front: str, rank: int, num_ranks: int
) -> None:
    beside = of_stack(front, strategy)
    beside.ours.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), getattr(default_hooks, name))
    with warnings.catch_warnings():
        # torch's own hooks call functions that newer torch deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        beside.backward()
    beside.check_gradients()


@on_ranks(2)
def test_comm_hooks_are_refused_with_the_peers_error_types(rank: int) -> None:
    beside = Beside(Stack(2), ("flat", "fsdp1_flat"))
    model, hook = beside.ours, HookCalls(None)
    for wrapped in beside.sharded.values():
        wrapped(beside.batch())
        with pytest.raises(AssertionError):
            wrapped.blocks[0].register_comm_hook(None, hook)
        with pytest.raises(ValueError, match="callable"):
            wrapped.register_comm_hook(None, "average")
        wrapped.register_comm_hook("state", hook)
        with pytest.raises(AssertionError):
            wrapped.register_comm_hook(None, hook)
    with pytest.raises(AssertionError, match="registered already"):
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(AssertionError, match=r"'blocks\.0' is nested"):
        model.blocks[0].register_comm_hook(None, hook)
