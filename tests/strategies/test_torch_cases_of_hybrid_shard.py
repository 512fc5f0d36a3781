"""The cases of torch's suite of hybrid sharding.

Covered: the three ways to name the groups (a mesh, a pair of groups, a policy alone) and the groups and ranks that
follow; refused arguments; training beside FULL_SHARD and a replicated model; strategies side by side; synchronised
starts; state dicts of model and optimizer, saved and loaded; ``no_sync``; clipping. All on 4 ranks as 2x2.

Not covered: the number of collectives on each internal group. A policy alone shards over the accelerators of a host in
torch, none on a CPU, and over the launcher's ranks of a host here (docs/differences.md).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support import assert_close
from tests.support.beside import adamw, average_gradients
from tests.support.both_sides import TOLERANCE, Layout, batch_of, build
from tests.support.models import Layer
from tests.support.torch_and_ours import BLOCKS, SHARDED, Side, beside_replica, on_both_sides, sgd, state_of, train
from tests.support.transport import mesh_type
from tests.support.zoo import CASES

CASE = BLOCKS
HYBRID = [Layout("HYBRID_SHARD", (2, 2)), Layout("_HYBRID_SHARD_ZERO2", (2, 2))]
NAMES = pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])


def batch(rank: int, step: int) -> Any:
    return batch_of(CASE, rank, step)


def pair_of_groups() -> tuple[Any, Any]:
    """This rank's shard group and replicate group on a 2x2 mesh. Every rank must call this."""
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return shards[dist.get_rank() // 2], replicas[dist.get_rank() % 2]


@on_both_sides(num_ranks=4, layouts=HYBRID)
def test_training_is_that_of_a_replicated_model(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    return beside_replica(model, build(CASE), CASE.loss_of, batch)


@on_both_sides(num_ranks=4)
@NAMES
def test_a_pair_of_groups_is_as_good_as_a_mesh(side: Side, use_orig_params: bool, strategy: str) -> Any:
    options = {"sharding_strategy": side.api.ShardingStrategy[strategy], "use_orig_params": use_orig_params}
    model = side.wrap_case(CASE, process_group=pair_of_groups(), **options)
    units = side.units(model)
    groups = [
        [dist.get_process_group_ranks(unit.process_group), dist.get_process_group_ranks(unit._inter_node_pg)]
        for unit in units
    ]
    rank = dist.get_rank()
    assert groups == [[[rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]]] * len(units)
    assert {(unit.rank, unit.world_size) for unit in units} == {(rank % 2, 2)}
    losses = train(model, CASE, adamw(model))
    return [groups, losses, state_of(model)]


@on_both_sides(num_ranks=4, layouts=HYBRID)
def test_all_units_have_the_mesh_s_groups(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    return [
        [
            dist.get_process_group_ranks(unit.process_group),
            dist.get_process_group_ranks(unit._inter_node_pg),
            unit.sharding_strategy.name,
            unit.rank,
            unit.world_size,
        ]
        for unit in side.units(model)
    ]


@on_both_sides(num_ranks=2)
@NAMES
def test_groups_that_do_not_make_a_mesh_are_refused(side: Side, use_orig_params: bool, strategy: str) -> None:
    def refused(**options: Any) -> None:
        options = {
            "sharding_strategy": side.api.ShardingStrategy[strategy],
            "use_orig_params": use_orig_params,
        } | options
        with pytest.raises(ValueError):
            side.wrap(build(CASE), **options)

    refused()  # neither groups nor a mesh nor a policy
    refused(process_group=dist.group.WORLD)
    refused(device_mesh=init_device_mesh(mesh_type(), (2,)))
    refused(device_mesh=init_device_mesh(mesh_type(), (1, 2)), process_group=dist.group.WORLD)


@on_both_sides(num_ranks=4, layouts=HYBRID)
@pytest.mark.parametrize("inner", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_fully_sharded_unit_may_sit_in_a_hybrid_tree(
    side: Side, layout: Layout, use_orig_params: bool, inner: str
) -> Any:
    model = build(CASE)
    model.blocks[0] = side.wrap(model.blocks[0], Layout(inner), use_orig_params=use_orig_params)
    model.blocks[1] = side.wrap(model.blocks[1], layout, use_orig_params=use_orig_params)
    model = side.wrap(model, layout, use_orig_params=use_orig_params)
    return beside_replica(model, build(CASE), CASE.loss_of, batch)


@on_both_sides(num_ranks=4, layouts=HYBRID, torch_cannot="it wants an accelerator for sync_module_states")
def test_all_ranks_start_from_rank_zero_s_state(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    case = CASES["buffers"]
    model = build(case)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(dist.get_rank())
    model = side.wrap(model, layout, units=case.units, use_orig_params=use_orig_params, sync_module_states=True)
    state = state_of(model)
    assert_close(state, {name: value.detach() for name, value in build(case).state_dict().items()}, **TOLERANCE)
    return state


@on_both_sides(num_ranks=4, layouts=HYBRID)
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_states_of_model_and_optimizer_are_saved_and_loaded(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    class Even(nn.Sequential):
        """Each first dim is at least 2: torch cannot save optimizer states otherwise."""

        def __init__(self) -> None:
            torch.manual_seed(3)
            super().__init__(Layer(5, 6), Layer(6, 4), nn.Linear(4, 2))

    def step(model: Any, optimizer: Any, index: int) -> torch.Tensor:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
        loss = model(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    configs = {"FULL": side.api.FullOptimStateDictConfig, "SHARDED": side.api.ShardedOptimStateDictConfig}
    trained = side.wrap(Even(), layout, units=(Layer,), use_orig_params=use_orig_params)
    optimizer = adamw(trained)
    losses = [step(trained, optimizer, index) for index in range(2)]
    with side.state_dict_as(trained, kind, None, configs[kind](offload_to_cpu=False)):
        state, states = trained.state_dict(), side.FSDP.optim_state_dict(trained, optimizer)
    other = Even()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    resumed = side.wrap(other, layout, units=(Layer,), use_orig_params=use_orig_params)
    again = adamw(resumed)
    with side.state_dict_as(resumed, kind, None, configs[kind](offload_to_cpu=False)):
        resumed.load_state_dict(state)
        again.load_state_dict(side.FSDP.optim_state_dict_to_load(resumed, again, states))
    ends = [step(trained, optimizer, 2), step(resumed, again, 2)]
    assert_close(ends[1], ends[0], **TOLERANCE)
    assert_close(state_of(resumed), state_of(trained), **TOLERANCE)
    return [losses, ends, state_of(trained)]


@on_both_sides(num_ranks=4, layouts=HYBRID)
def test_accumulation_and_clipping_span_the_whole_mesh(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, plain = side.wrap_case(CASE, layout, use_orig_params=use_orig_params), build(CASE)
    rank = dist.get_rank()
    for index in range(2):
        CASE.loss_of(plain, batch(rank, index)).backward()
        average_gradients(plain)
    with model.no_sync():
        CASE.loss_of(model, batch(rank, 0)).backward()
    CASE.loss_of(model, batch(rank, 1)).backward()
    norm = model.clip_grad_norm_(0.1)
    assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), **TOLERANCE)
    for each in (model, plain):
        sgd(each).step()
    state = state_of(model)
    assert_close(state, {name: value.detach() for name, value in plain.state_dict().items()}, **TOLERANCE)
    return [norm, state]


@on_both_sides(num_ranks=4, layouts=[*HYBRID, *SHARDED])
def test_the_same_steps_follow_from_every_strategy(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    case = CASES["uneven sizes"]
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    losses = train(model, case, adamw(model), range(2))
    return [losses, state_of(model)]
