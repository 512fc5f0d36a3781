"""Saved and loaded in every form, training goes on as if nothing had happened, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.comm import transfers
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.state_dict.kit import (
    FULL,
    LOCAL,
    OPTIMIZERS,
    SHARDED,
    TASKS,
    Task,
    group_of,
    groups_of,
    load,
    save,
    seeded_task,
    single_rank_allowed,
    train,
    unsharded_allowed,
    wrapped,
)
from tests.support import OWN_STATISTICS, assert_close, assert_equal, on_ranks
from tests.support import wrapper_models as models
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import no_shard_allowed
from tests.support.models import BufferedBlock
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import batch, whole_state


def check_round_trips(task_name: str, how: str, groups: dict[str, Any], optim: str, use_orig_params: bool) -> None:
    task, kinds = TASKS[task_name], [FULL, SHARDED] if "mesh" in how else [FULL, SHARDED, LOCAL]
    model = wrapped(task, how, groups, use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS[optim](model.parameters())
    train(model, optimizer, task, range(2))
    saved = {kind: save(model, optimizer, kind) for kind in kinds}
    losses = train(model, optimizer, task, range(2, 4))
    expected = whole_state(model)
    for kind in kinds:
        what = f"{kind.name}, {task_name}, {how}, {optim}"
        other = wrapped(task, how, groups, seed=1, use_orig_params=use_orig_params)
        other_optimizer = OPTIMIZERS[optim](other.parameters())
        train(other, other_optimizer, task, range(5, 6))
        load(other, other_optimizer, kind, saved[kind])
        assert_equal(train(other, other_optimizer, task, range(2, 4)), losses, what=f"losses: {what}")
        assert_equal(whole_state(other), expected, what=what)


@ORIG_PARAMS
@pytest.mark.parametrize("how", ["FULL_SHARD", "mesh", "SHARD_GRAD_OP", "NO_SHARD"])
@OWN_STATISTICS
@on_ranks(2)
def test_training_goes_on_to_the_bit_at_two_ranks(how: str, use_orig_params: bool) -> None:
    groups = groups_of(how)
    for task_name in TASKS:
        check_round_trips(task_name, how, groups, "adamw", use_orig_params)


@ORIG_PARAMS
@pytest.mark.parametrize("how", ["FULL_SHARD", "mesh", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD mesh"])
@OWN_STATISTICS
@on_ranks(4)
def test_training_goes_on_to_the_bit_at_four_ranks(how: str, use_orig_params: bool) -> None:
    groups = groups_of(how)
    for task_name in TASKS:
        check_round_trips(task_name, how, groups, "adamw", use_orig_params)


@ORIG_PARAMS
@pytest.mark.parametrize("optim", [name for name in OPTIMIZERS if name != "adamw"])
@on_ranks(2)
def test_every_optimizer_goes_on_to_the_bit(optim: str, use_orig_params: bool) -> None:
    check_round_trips("uneven", "FULL_SHARD", {}, optim, use_orig_params)


def world_of(task_name: str, size: int, how: str, use_orig_params: bool, seed: int = 0) -> tuple[Any, Any, Any]:
    """A model over the first ``size`` ranks with its optimizer and group; Nones on the others."""
    task, group = TASKS[task_name], group_of(size)
    if group is None:
        return None, None, None
    policy = {"blocks": {BufferedBlock}, "layers": {nn.Linear}}[how]
    with single_rank_allowed(), no_shard_allowed():
        model = FSDP(
            seeded_task(task, seed),
            device_mesh=DeviceMesh.from_group(group, "cpu"),
            auto_wrap_policy=ModuleWrapPolicy(policy),
            use_orig_params=use_orig_params,
        )
    return model, OPTIMIZERS["adamw"](model.parameters()), group


def same_data(model: nn.Module, optimizer: torch.optim.Optimizer, task_name: str, steps: range) -> list[float]:
    """Steps on the same data on every rank, so that the number of ranks makes no difference."""
    return models.train(model, optimizer, 0, steps, TASKS[task_name].data)


RESHARDINGS = [
    *(("uneven", 4, 2, False), ("uneven", 2, 4, True), ("uneven", 2, 3, False), ("uneven", 3, 2, True)),
    *(("uneven", 2, 1, True), ("uneven", 1, 2, False)),
    *(("tied", 4, 2, True), ("tied", 2, 3, False), ("batch norm", 2, 4, False), ("batch norm", 2, 1, True)),
]


@pytest.mark.parametrize(("task_name", "before", "after", "use_orig_params"), RESHARDINGS)
@on_ranks(4)
def test_training_goes_on_at_another_number_of_ranks_and_with_another_wrapping(
    task_name: str, before: int, after: int, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    model, optimizer, group = world_of(task_name, before, "blocks", use_orig_params)
    expected: list[Any] = [None]
    if model is not None:
        same_data(model, optimizer, task_name, range(2))
        with unsharded_allowed(), peer_warnings_silenced(), FSDP.state_dict_type(model, SHARDED):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=tmp_path / "dcp", process_group=group)
        saved = save(model, optimizer, FULL)
        if rank == 0:
            torch.save(saved, tmp_path / "full.pt")
        expected = [(same_data(model, optimizer, task_name, range(2, 4)), whole_state(model))]
    dist.broadcast_object_list(expected, src=0)
    # Another wrapping changes which parameters share a flat one, but not what is saved.
    for how in ("blocks", "layers"):
        for kind in (FULL, SHARDED):
            other, other_optimizer, other_group = world_of(task_name, after, how, use_orig_params, seed=1)
            if other is None:
                continue
            what = f"{kind.name}, {how}"
            if kind is FULL:
                load(other, other_optimizer, kind, torch.load(tmp_path / "full.pt", weights_only=True))
            else:
                load_by_dcp(other, other_optimizer, task_name, tmp_path / "dcp", other_group)
            losses, state = same_data(other, other_optimizer, task_name, range(2, 4)), whole_state(other)
            assert_close(losses, expected[0][0], rtol=1e-6, atol=1e-6, what=f"losses: {what}")
            assert_close(state, expected[0][1], rtol=1e-5, atol=1e-6, what=what)
    dist.barrier()


def load_by_dcp(
    model: Any, optimizer: torch.optim.Optimizer, task_name: str, path: Path, group: dist.ProcessGroup
) -> None:
    """Read what is there into the model's own state dicts, then load those."""
    same_data(model, optimizer, task_name, range(1))  # so that the optimizer has states to read into
    with unsharded_allowed(), peer_warnings_silenced(), FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path, process_group=group)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))


@pytest.mark.parametrize("kind", [FULL, LOCAL, SHARDED], ids=lambda kind: kind.name.split("_")[0].lower())
@on_ranks(4)
@mock.patch.object(transfers, "_MAX_IN_FLIGHT_NBYTES", 1000)
def test_experts_of_other_sizes_on_other_ranks_load_what_they_have_saved(kind: Any, rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    width = [60, 12][rank // 2]

    def built(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        first, last = nn.Linear(3, 3), nn.Linear(3, 2)
        expert = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 3))
        model = FSDP(nn.Sequential(FSDP(first), FSDP(expert, process_group=pairs[rank // 2]), last))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, Task(nn.Module, batch), range(1))
        return model, optimizer

    (one, its_optimizer), (other, other_optimizer) = built(0), built(1)
    saved = save(one, its_optimizer, kind)
    load(other, other_optimizer, kind, saved)
    assert_equal(list(other.parameters()), list(one.parameters()))
    assert_equal(other_optimizer.state_dict()["state"], its_optimizer.state_dict()["state"])
