"""Units of fully_shard on a fake accelerator: resharded to smaller groups, prefetched and unsharded by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_flat.composable.fully_sharding
from fsdp_flat.composable import MixedPrecisionPolicy, fully_shard
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import Rehearsal, batch, rehearsal
from tests.rehearsal.kit import train as train_with
from tests.support.models import Block, Stack


class LocalUpdates(torch.optim.Optimizer):
    """Updates local tensors: DTensor has no operations for the fake accelerator."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param._local_tensor.sub_(param.grad._local_tensor)


train = functools.partial(train_with, optimizer=LocalUpdates)


def sharded(run: Rehearsal, build: Callable[[], Any] = Stack, **kwargs: Any) -> Any:
    """Shard a model on the accelerator; discard findings during construction."""
    run.checker.is_on = False
    with DEVICE:
        model = build()
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    module = fsdp_flat.composable.fully_sharding
    with mock.patch.object(module, "current_accelerator", return_value=DEVICE):
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **kwargs)
        fully_shard(model, mesh=mesh, **kwargs)
    run.models.append(model)
    run.recorder.name_storages()
    run.recorder.log.clear()
    run.checker.is_on = True
    return model


@pytest.mark.parametrize("reshards", [None, True, False, 2])
def test_a_step_is_ordered_and_does_not_stop_the_host(reshards: Any) -> None:
    with rehearsal() as run:
        model = sharded(run, reshard_after_forward=reshards)
        train(run, model, num_steps=3)
    run.check()


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("num_layers", [1, 4])
def test_one_operation_copies_a_unit_from_and_to_the_rows_of_ranks(num_layers: int, low: bool) -> None:
    """As many launches for a unit of many parameters as for one of few."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    with rehearsal() as run:
        build = functools.partial(Stack, block=lambda width: nn.Sequential(*[Block(width) for _ in range(num_layers)]))
        model = sharded(run, build, **({"mp_policy": policy} if low else {}))
        train(run, model, num_steps=1)
        run.recorder.log.clear()
        model(batch()).float().pow(2).mean().backward()
    num_units, num_gathers = 4, 4 + 2  # the root and the last block stay for backward
    log = run.recorder.log
    assert log.count("all_gather_single") == num_gathers
    assert log.count("aten::split_with_sizes_copy") == num_gathers
    assert log.count("aten::_chunk_cat") == num_units
    assert "aten::_foreach_copy_" not in log


@pytest.mark.parametrize("reshards", [None, 2])
def test_lists_of_prefetched_modules_and_open_backwards_are_ordered(reshards: Any) -> None:
    with rehearsal() as run:
        model = sharded(run, reshard_after_forward=reshards)
        blocks = model.blocks
        model.set_modules_to_forward_prefetch([blocks[1], blocks[0]])
        blocks[2].set_modules_to_backward_prefetch([blocks[0], blocks[1]])
        for step in range(4):
            model.set_is_last_backward(step % 2 == 1)
            train(run, model, num_steps=1)
    run.check()


@pytest.mark.parametrize("async_op", [True, False])
def test_units_unsharded_by_hand_after_the_optimizer_are_ordered(async_op: bool) -> None:
    with rehearsal() as run:
        model = sharded(run)
        optimizer = LocalUpdates(model.parameters())
        for _ in range(2):
            for block in model.blocks:
                block.unshard(async_op=async_op)
            train_with(run, model, num_steps=1, optimizer=lambda _: optimizer)
        model.blocks[0].unshard()
        model.blocks[0].reshard()
        model(batch()).pow(2).mean().backward()
    run.check()
