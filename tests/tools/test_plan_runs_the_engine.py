"""``plan`` runs a step of the engine: what that step does is counted, and nothing of it is left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import CPUOffload, ShardingStrategy, plan
from fsdp_flat.tools.torch_tools import known_groups
from tests.support import on_ranks
from tests.support.kit import BLOCKS, Block, Stack

APIS = ["FullyShardedDataParallel", "fully_shard"]
DEVICES = ["cpu", "cuda"]


def meta_stack() -> nn.Module:
    with torch.device("meta"):
        return Stack(6, 64)


def planned(num_ranks: int = 4, **arguments: Any) -> Any:
    batch = torch.empty(16, 64, device="meta")
    return plan(meta_stack(), num_ranks, **{"auto_wrap_policy": BLOCKS, "batch": batch, **arguments})


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_memory_budget_keeps_units_and_saves_their_second_all_gathers(api: str, device: str) -> None:
    budgets = ["FULL_SHARD:0B", "FULL_SHARD:150kB", "FULL_SHARD:1GB"]
    none, some, all_ = (planned(api=api, device_type=device, sharding_strategy=budget) for budget in budgets)
    full = planned(api=api, device_type=device)
    assert none.sent_nbytes == full.sent_nbytes > some.sent_nbytes > all_.sent_nbytes
    assert none.phases[0].nbytes.gathered <= some.phases[0].nbytes.gathered < all_.phases[0].nbytes.gathered


@pytest.mark.from_size("cover", "plans a step in many ways")
@pytest.mark.parametrize("api", APIS)
def test_a_search_spends_what_full_sharding_leaves_on_a_memory_budget(api: str) -> None:
    freed, kept = (
        planned(api=api, checkpointing=False, sharding_strategy=strategy).peak_nbytes
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    )
    whole = planned(api=api, checkpointing=False, fit=kept)
    assert not any(":" in choice.strategy for choice in whole.choices)
    found = planned(api=api, checkpointing=False, fit=(freed + kept) // 2)
    best = found.choices[0]
    assert best.strategy.startswith("FULL_SHARD:")
    assert best.sent_nbytes < next(c.sent_nbytes for c in found.choices if c.strategy == "FULL_SHARD")
    again = planned(api=api, **best.arguments)
    assert again.peak_nbytes == best.peak_nbytes <= (freed + kept) // 2


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.HYBRID_SHARD])
def test_nothing_of_a_plan_is_left_in_the_process(api: str, strategy: ShardingStrategy | None) -> None:
    assert not dist.is_initialized()
    model = meta_stack()
    before = {name: (id(param), param.device.type) for name, param in model.named_parameters()}
    planned(api=api, sharding_strategy=strategy, num_replicas=1 if strategy is None else 2)
    assert not dist.is_initialized()
    assert {name: (id(param), param.device.type) for name, param in model.named_parameters()} == before
    assert type(model) is Stack


@on_ranks(2)
@pytest.mark.parametrize("api", APIS)
def test_a_plan_inside_a_job_leaves_its_groups_alone(api: str, rank: int) -> None:
    before, default = known_groups(), dist.group.WORLD
    first = planned(64, api=api)
    assert first == planned(64, api=api), "ranks may plan while others do not"
    assert (known_groups(), dist.group.WORLD) == (before, default)
    value = torch.full((1,), float(rank))
    dist.all_reduce(value)
    assert value.item() == 1


class Attributes(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), torch.ones(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("device", DEVICES)
def test_plain_tensors_of_a_model_are_where_it_computes(device: str) -> None:
    found = plan(Attributes(), 2, batch=torch.empty(16, 64), device_type=device)
    assert found.peak_nbytes > 0


class Reads(nn.Linear):
    """Makes a tensor on the host in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.ones(64, device=x.device) * torch.tensor(2.0)


@pytest.mark.parametrize("api", APIS)
def test_offloaded_shards_are_copied_to_the_device_for_each_all_gather(api: str) -> None:
    here, offloaded = (planned(api=api, cpu_offload=CPUOffload(each)) for each in (False, True))
    shard = max(unit.shard_nbytes for unit in here.units)
    more = offloaded.phases[0].nbytes.gathered - here.phases[0].nbytes.gathered
    assert shard / 2 < more < 2.5 * shard
    assert offloaded.host_nbytes >= here.shard_nbytes + here.grad_nbytes + here.phases[0].nbytes.optimizer
    assert offloaded.sent_nbytes == here.sent_nbytes


def test_a_tensor_of_the_host_without_dims_meets_those_of_the_accelerator() -> None:
    with torch.device("meta"):
        model = Reads(64, 64)
    assert plan(model, 2, batch=torch.empty(16, 64)).peak_nbytes > 0


def test_the_order_of_a_model_is_that_of_its_forwards() -> None:
    found = planned(forward_prefetch=True)
    early = planned(forward_prefetch=False)
    assert found.sent_nbytes == early.sent_nbytes
    assert found.phases[0].nbytes.gathered >= early.phases[0].nbytes.gathered
    units = list(dict.fromkeys(moment.unit for moment in found.moments if moment.phase.value == "forward"))
    assert units == ["Stack", *[f"blocks.{index}" for index in range(6)]]


def test_classes_of_modules_are_recomputed_inside_units() -> None:
    whole = planned(checkpointing=partial(list, [Block])())
    assert whole.flops > planned().flops
