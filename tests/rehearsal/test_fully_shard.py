"""Units of fully_shard on a fake accelerator: resharded to smaller groups, prefetched and unsharded by hand."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_flat.composable.fully_sharding
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.composable import MixedPrecisionPolicy, fully_shard
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import Rehearsal, batch, rehearsal
from tests.rehearsal.kit import train as train_with
from tests.rehearsal.models import on_device
from tests.rehearsal.overlap import launched
from tests.support.models import Block, Stack
from tests.support.steps import mesh_for


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


def sharded(
    run: Rehearsal,
    build: Callable[[], Any] = Stack,
    *,
    units: Callable[[Any], Iterable[nn.Module]] = lambda model: model.blocks,
    **kwargs: Any,
) -> Any:
    """Shard a model on the accelerator, and its ``units``; discard findings during construction."""
    run.checker.is_on = False
    with DEVICE:
        model = build()
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    module = fsdp_flat.composable.fully_sharding
    with mock.patch.object(module, "current_accelerator", return_value=DEVICE):
        for unit in units(model):
            fully_shard(unit, mesh=mesh, **kwargs)
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


# What a unit launches in a step besides its collectives, if it has no padding: two all-gathers, one reduction.
TABLE = {
    "wrapper": {"aten::copy_": 2, "aten::_foreach_copy_": 1},
    "fully_shard": {"aten::copy_": 2, "aten::split_with_sizes_copy": 2, "aten::_chunk_cat": 1},
    "fully_shard, partly frozen": {
        "aten::_foreach_copy_": 2,
        "aten::copy_": 2,
        "aten::split_with_sizes_copy": 2,
        "aten::_chunk_cat": 1,
    },
    "wrapper, sums": {"aten::copy_": 2, "aten::_foreach_copy_": 1, "aten::div_": 1},
    "wrapper, replicas": {"aten::copy_": 2, "aten::_foreach_copy_": 1},
}


class Even(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.first(x)))


@pytest.mark.parametrize("api", TABLE)
def test_a_unit_launches_what_the_table_has(api: str) -> None:
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

    def build(num_blocks: int) -> nn.Module:
        model = Stack(num_blocks, block=Even)
        for block in model.blocks if "frozen" in api else ():
            block.first.requires_grad_(False)
        return model

    def launches(num_blocks: int) -> Counter[str]:
        with rehearsal() as run:
            if "fully_shard" in api:
                model, optimizer = (
                    sharded(run, functools.partial(build, num_blocks), mp_policy=MixedPrecisionPolicy(**low)),
                    LocalUpdates,
                )
            else:
                policy, optimizer = ModuleWrapPolicy({Even}), torch.optim.SGD
                options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD} if "replicas" in api else {}
                options |= mesh_for(options["sharding_strategy"]) if options else {}
                model = run.wrap(
                    on_device(lambda: build(num_blocks)),
                    mixed_precision=MixedPrecision(**low),
                    auto_wrap_policy=policy,
                    **options,
                )
                for unit in FSDP.fsdp_modules(model):
                    unit.set_force_sum_reduction_for_comms("sums" in api)
            train_with(run, model, num_steps=1, optimizer=optimizer)
            with launched(run) as names:
                model(batch()).float().pow(2).mean().backward()
        return Counter(names)

    few, many = launches(4), launches(8)
    assert {op: (number - few[op]) / 4 for op, number in many.items() if number != few[op]} == TABLE[api]


def test_a_parameter_without_a_gradient_leaves_a_unit_its_one_operation() -> None:
    class Unused(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.idle = nn.Linear(width, width)

    with rehearsal() as run:
        model = sharded(run, functools.partial(Stack, block=Unused))
        train(run, model, num_steps=1)
        with launched(run) as names:
            model(batch()).pow(2).mean().backward()
    assert names.count("aten::_chunk_cat") == 4
    assert "aten::_foreach_copy_" not in names


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
