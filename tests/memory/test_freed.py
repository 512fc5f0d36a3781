"""A wrapped model that nobody holds any more gives everything back: shards, buffers and process groups."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard
from fsdp_flat.core import units_of
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks


def _built(_model: nn.Module) -> None:
    pass


def _forward(model: nn.Module) -> None:
    model(torch.ones(2, 4))


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _checkpoint(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())
    with FSDP.summon_full_params(model):
        pass


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("use", [_built, _forward, _step, _checkpoint])
def test_a_model_that_nobody_holds_is_freed(use: Callable[[nn.Module], None], use_orig_params: bool) -> None:
    group = dist.new_group()
    model = FSDP(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        process_group=group,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    use(model)
    units = [weakref.ref(wrapper._unit) for wrapper in FSDP.fsdp_modules(model)]
    handles = [weakref.ref(handle) for ref in units for handle in ref().param_groups]
    gone = weakref.ref(group)
    del model, group
    dist.barrier()
    dist.destroy_process_group(gone())
    gc.collect()
    assert handles
    assert [ref() for ref in (*units, *handles)] == [None] * len(units + handles)
    assert gone() is None


@on_ranks(2)
def test_a_loss_outlives_the_model_that_made_it() -> None:
    model = FSDP(nn.Sequential(nn.Linear(4, 4, bias=False)), use_orig_params=True, sync_module_states=True)
    weight = model.module[0].weight
    loss = model(torch.ones(2, 4)).sum()
    del model
    gc.collect()
    loss.backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrapping_frees_unsharded_parameters_without_the_garbage_collector(use_orig_params: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [StorageWeakRef(param.untyped_storage()) for param in module.parameters()]
    gc.collect()
    gc.disable()
    try:
        policy = ModuleWrapPolicy({nn.Linear})
        model = FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        assert [ref.expired() for ref in before] == [True] * 4
        del model
    finally:
        gc.enable()


@on_ranks(2)
@pytest.mark.parametrize("use", [_built, _forward, _step])
def test_a_model_of_fully_shard_that_nobody_holds_is_freed(use: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for index in range(len(model)):
        fully_shard(model[index])
    fully_shard(model)
    use(model)
    units = [weakref.ref(unit) for unit in units_of(model)]
    del model
    gc.collect()
    assert len(units) == 3
    assert [ref() for ref in units] == [None] * 3
