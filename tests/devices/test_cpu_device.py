"""Pain 19: the CPU is a device like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_flat import FullStateDictConfig, ShardingStrategy, StateDictType
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.core import units_of
from tests.support import assert_equal, on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside
from tests.support.models import Stack
from tests.support.steps import STRATEGIES, mesh_for


@on_ranks(2)
@pytest.mark.parametrize("device_id", [None, "cpu", "cpu:0"])
def test_the_cpu_needs_no_device_id_and_takes_either_spelling(device_id: str | None) -> None:
    kwargs: dict[str, Any] = {} if device_id is None else {"device_id": torch.device(device_id)}
    beside = Beside(Stack(), **kwargs)
    assert beside.ours.compute_device == torch.device("cpu")
    assert all(
        handle.spec.device == torch.device("cpu") for unit in units_of(beside.ours) for handle in unit.param_groups
    )
    beside.train(num_steps=2)


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_offloaded_state_dict_holds_live_independent_tensors(strategy: ShardingStrategy, front: str) -> None:
    beside = Beside(Stack(), front, sharding_strategy=strategy, **mesh_for(strategy))
    with FSDP.state_dict_type(
        beside.ours, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    ):
        state = beside.ours.state_dict()
    expected = {name: value.clone() for name, value in beside.plain.state_dict().items()}
    assert_equal(dict(state), expected)
    storages = {value.untyped_storage().data_ptr() for value in state.values()}
    assert len(storages) == len(state), "no two entries share memory"
    beside.train()
    assert_equal(dict(state), expected, what="the state dict after a step")
    for value in state.values():
        value.zero_()
    beside.check_parameters()


def summoned_to_cpu(model: FSDP) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What is shown inside the block, and copies of it made there."""
    with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=True):
        shown = {name: param.detach() for name, param in model.named_parameters()}
        return shown, {name: value.clone() for name, value in shown.items()}


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_summoned_to_the_cpu_are_live_inside_and_leave_the_shards_intact(
    strategy: ShardingStrategy, front: str
) -> None:
    beside = Beside(Stack(), front, sharding_strategy=strategy, **mesh_for(strategy))
    beside.train()
    expected = {name: param.detach() for name, param in beside.plain.named_parameters()}
    with pytest.warns(UserWarning, match="full copy on its CPU"):
        shown, kept = summoned_to_cpu(beside.ours)
    for name, value in kept.items():
        assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-11)
    assert_equal(shown, kept, what="what was shown, after the block")
    beside.train()
