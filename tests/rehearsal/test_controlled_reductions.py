"""Controlled reductions, hooks and communication objects on a fake accelerator are ordered and do not stop the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import ShardingStrategy
from fsdp_flat.comm import torch_comm
from fsdp_flat.core import units_of
from tests.rehearsal.kit import Rehearsal, batch, rehearsal, train
from tests.rehearsal.models import BOTH_KINDS
from tests.support.steps import mesh_for


def backward(model: nn.Module) -> None:
    model(batch()).float().pow(2).mean().backward()


@BOTH_KINDS
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD])
def test_partial_shards_are_ordered(use_orig_params: bool, strategy: ShardingStrategy) -> None:
    with rehearsal() as run:
        model: Any = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for is_last in (False, False, True):
                model.set_requires_all_reduce(is_last)
                backward(model)
            optimizer.step()
            optimizer.zero_grad()
    run.check()


@BOTH_KINDS
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("max_input_buffers", [1, 3])
def test_hooks_on_reduced_shards_are_ordered(use_orig_params: bool, own_stream: bool, max_input_buffers: int) -> None:
    with rehearsal() as run:
        model: Any = run.wrap(use_orig_params=use_orig_params)
        stream = run.machine.new_stream(name="hook") if own_stream else None
        for wrapper in model.fsdp_modules(model):
            wrapper.set_all_reduce_hook(lambda shard: shard.mul_(2), stream=stream)
        model.set_reduce_scatter_max_input_buffers(max_input_buffers)
        train(run, model)
    run.check()


class Gathers:
    """An all-gather of FSDP2's interface."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return torch_comm.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Reductions(Gathers):
    """A reduce-scatter of FSDP2's interface."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return torch_comm.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@BOTH_KINDS
def test_communication_objects_are_ordered(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model: Any = run.wrap(use_orig_params=use_orig_params)
        for wrapper in model.fsdp_modules(model):
            wrapper.set_custom_all_gather(Gathers())
            wrapper.set_custom_reduce_scatter(Reductions())
        train(run, model)
    run.check()


def trained_after(run: Rehearsal, *, optimizer_first: bool) -> None:
    """Train with an event that was recorded after the optimizer, or before it."""
    model: Any = run.wrap(use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        before = run.machine.compute.record_event()
        optimizer.step()
        after = run.machine.compute.record_event()
        model.set_post_optim_event(after if optimizer_first else before)
        optimizer.zero_grad()
    assert units_of(model)


def test_an_event_after_the_optimizer_is_enough() -> None:
    with rehearsal() as run:
        trained_after(run, optimizer_first=True)
    run.check()


def test_an_event_before_the_optimizer_is_found_by_the_check() -> None:
    with rehearsal() as run:
        trained_after(run, optimizer_first=False)
    assert run.findings


@BOTH_KINDS
@pytest.mark.skipif(not torch_comm.MOVES_MEMORY, reason="torch before 2.12 moves no memory between storages")
@pytest.mark.parametrize("symmetric", [False, True])
def test_flat_buffers_in_the_memory_of_the_backend_are_ordered_and_copied_no_more_than_others(
    use_orig_params: bool, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sizes.append(math.prod((size,) if isinstance(size, int) else size))
        return torch.empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch_comm, "tensor_allocator", lambda *_: allocate)
    monkeypatch.setattr(torch_comm, "symmetric_allocator", lambda *_: allocate)
    logs = []
    for in_memory in (False, True):
        with rehearsal() as run:
            model: Any = run.wrap(use_orig_params=use_orig_params)
            for wrapper in model.fsdp_modules(model) if in_memory else ():
                if symmetric:
                    wrapper.set_symm_mem_for_comm()
                else:
                    wrapper.set_allocate_memory_from_process_group_for_comm(True)
            train(run, model)
            logs.append([entry for entry in run.recorder.log if "copy" in entry or "all_gather" in entry])
        run.check()
    assert logs[0] == logs[1]
    num_units, num_steps = len(units_of(model)), 2
    # Of each unit in a step: its gradient, its reduced shard, and its parameters, once or twice.
    assert 3 * num_units * num_steps < len(sizes) <= 4 * num_units * num_steps
