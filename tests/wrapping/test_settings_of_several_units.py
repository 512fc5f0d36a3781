"""Calls that set something of several units: one that raises changes none of them, and one that warns does so once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_flat.collectives import use_collectives
from fsdp_flat.comm import torch_comm
from fsdp_flat.composable import fully_shard
from fsdp_flat.core import units_of
from fsdp_flat.errors import PhaseError
from tests.support import on_ranks
from tests.support.beside import blocks_and_root
from tests.support.experts import Meshes, needs_mesh_infos
from tests.support.kit import seeded
from tests.support.models import Moe, Stack

CALLS: dict[str, Callable[[Any], None]] = {
    "use_collectives": lambda model: use_collectives(model, all_gather=lambda *_: None),
    "set_separate_reduce_scatter_group": lambda model: model.set_separate_reduce_scatter_group(),
    "set_backend_collectives": lambda model: model.set_backend_collectives(),
}


@on_ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_collectives_of_all_units_are_replaced_or_none(call: str) -> None:
    model = blocks_and_root(seeded(Stack))
    handle = model.blocks[1].unshard(async_op=True)
    units = units_of(model)
    before = [(unit.param_groups[0].comm.choice, unit.control.keeps_last) for unit in units]
    num_groups = len(torch.distributed.distributed_c10d._world.pg_map)
    with pytest.raises(PhaseError, match=r"unit 'Block' were replaced while"):
        CALLS[call](model)
    assert [(unit.param_groups[0].comm.choice, unit.control.keeps_last) for unit in units] == before
    assert len(torch.distributed.distributed_c10d._world.pg_map) == num_groups
    handle.wait()
    CALLS[call](model)
    assert all(unit.param_groups[0].comm.choice != choice for unit, (choice, _) in zip(units, before, strict=True))


@needs_mesh_infos
@on_ranks(4)
def test_memory_is_of_the_group_of_each_mesh_that_has_some_and_stays_during_a_step() -> None:
    model = Meshes.of(4, 2).shard(seeded(Moe), fully_shard)
    (unit,) = units_of(model.blocks[0])
    outer, inner = [handle.comm for handle in unit.param_groups]
    with pytest.MonkeyPatch.context() as patch:
        of_outer = outer.options.groups.shard.group
        patch.setattr(torch_comm, "tensor_allocator", lambda group, _: torch.empty if group is of_outer else None)
        model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    before = outer.choice, inner.choice
    assert [choice.gather_memory is None for choice in before] == [False, True]
    unit.gather()
    with pytest.raises(PhaseError):
        model.blocks[0].set_allocate_memory_from_process_group_for_comm(False)
    assert (outer.choice, inner.choice) == before
    model.blocks[0].reshard()


@needs_mesh_infos
@on_ranks(4)
def test_a_call_warns_once_of_parameters_on_several_meshes() -> None:
    meshes, model = Meshes.of(4, 2), seeded(Moe)
    place = meshes.split(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(model, mesh=meshes.dense, shard_placement_fn=place, reshard_after_forward=1)
    texts = [str(each.message) for each in caught if "reshard_after_forward=1" in str(each.message)]
    assert len(texts) == 1
    assert caught[0].filename == __file__
    assert all(unit.control.reshard_after_forward is False for unit in units_of(model))
