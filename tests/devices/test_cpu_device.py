"""Pain 19: the CPU is a device like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_flat import CPUOffload, FullStateDictConfig, ShardingStrategy, StateDictType
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.core import units_of
from tests.support import assert_equal, on_ranks
from tests.support.kit import Stack
from tests.support.steps import STRATEGIES, Twin, mesh_for


@on_ranks(2)
@pytest.mark.parametrize("device_id", [None, "cpu", "cpu:0"])
def test_the_cpu_needs_no_device_id_and_takes_either_spelling(device_id: str | None) -> None:
    kwargs: dict[str, Any] = {} if device_id is None else {"device_id": torch.device(device_id)}
    twin = Twin.of(Stack(), **kwargs)
    assert twin.model.compute_device == torch.device("cpu")
    assert all(
        handle.spec.device == torch.device("cpu") for unit in units_of(twin.model) for handle in unit.param_groups
    )
    twin.step()
    twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_offloaded_state_dict_holds_live_independent_tensors(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
    with FSDP.state_dict_type(
        twin.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    ):
        state = twin.model.state_dict()
    expected = {name: value.clone() for name, value in twin.plain.state_dict().items()}
    assert_equal(dict(state), expected)
    storages = {value.untyped_storage().data_ptr() for value in state.values()}
    assert len(storages) == len(state), "no two entries share memory"
    twin.step()
    assert_equal(dict(state), expected, what="the state dict after a step")
    for value in state.values():
        value.zero_()
    twin.check_parameters()


def summoned_to_cpu(model: FSDP) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What is shown inside the block, and copies of it made there."""
    with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=True):
        shown = {name: param.detach() for name, param in model.named_parameters()}
        return shown, {name: value.clone() for name, value in shown.items()}


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_summoned_to_the_cpu_are_live_inside_and_leave_the_shards_intact(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    twin = Twin.of(Stack(), sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
    twin.step()
    expected = {name: param.detach() for name, param in twin.plain.named_parameters()}
    with pytest.warns(UserWarning, match="full copy on its CPU"):
        shown, kept = summoned_to_cpu(twin.model)
    for name, value in kept.items():
        assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    assert_equal(shown, kept, what="what was shown, after the block")
    twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_offloading_parameters_on_the_cpu_trains_as_the_reference(use_orig_params: bool) -> None:
    twin = Twin.of(Stack(), cpu_offload=CPUOffload(offload_params=True), use_orig_params=use_orig_params)
    for _ in range(2):
        twin.step()
