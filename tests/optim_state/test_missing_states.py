"""States that some rank's optimizer lacks are an error on every rank and are never filled in."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_flat import FullOptimStateDictConfig, ShardedOptimStateDictConfig, load_checkpoint, save_checkpoint
from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.state_dict.kit import FULL, LOCAL, SHARDED, TASKS, save, train
from tests.support import assert_equal, on_ranks
from tests.wrapper.models import seeded, shard

KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is an older form of optim_state_dict:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
]
Model = Any
Optimizer = torch.optim.Optimizer


def trained(use_orig_params: bool, strategy: str = "FULL_SHARD", **where: Any) -> tuple[Model, Optimizer]:
    model = shard(seeded(), strategy, use_orig_params=use_orig_params, **where)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, optimizer, TASKS["uneven"], range(1))
    return model, optimizer


def in_form(kind: Any, config: Any = None) -> Callable[[Model, Optimizer], Any]:
    def run(model: Model, optimizer: Optimizer) -> Any:
        with FSDP.state_dict_type(model, kind, None, config):
            return FSDP.optim_state_dict(model, optimizer)

    return run


SAVES: dict[str, Callable[[Model, Optimizer], Any]] = {
    "full": in_form(FULL),
    "full on rank 0": in_form(FULL, FullOptimStateDictConfig(rank0_only=True)),
    "sharded": in_form(SHARDED),
    "local": in_form(LOCAL),
    "older full": FSDP.full_optim_state_dict,
    "older sharded": FSDP.sharded_optim_state_dict,
}


def without_a_step(model: Model, optimizer: Optimizer) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def without_parameters(model: Model, optimizer: Optimizer) -> Optimizer:
    fewer = torch.optim.Adam([param for param in model.parameters() if param is not held(model, optimizer)], lr=0.05)
    fewer.state.update({param: row for param, row in optimizer.state.items() if param is not held(model, optimizer)})
    return fewer


def without_an_entry(model: Model, optimizer: Optimizer) -> Optimizer:
    del optimizer.state[held(model, optimizer)]["exp_avg_sq"]
    return optimizer


def held(model: Model, optimizer: Optimizer) -> torch.nn.Parameter:
    """The last parameter of a block that this rank has elements of."""
    names = dict(model.named_parameters())
    return [param for name, param in names.items() if "blocks.1" in name and param.numel()][-1]


LACKING = {each.__name__: each for each in (without_a_step, without_parameters, without_an_entry)}


def assert_refused(run: Callable[..., object], model: Model, optimizer: Optimizer, ranks: list[int]) -> None:
    """It raises here what names one of the ranks and a parameter of which that rank has elements."""
    __tracebackhide__ = True
    with pytest.raises(RuntimeError) as caught:
        run(model, optimizer)
    text = str(caught.value)
    assert re.search(rf"rank {ranks} .*'blocks\.1\.(up|down)\.(weight|bias)'", text), text


@KINDS
@pytest.mark.parametrize("lacking", LACKING)
@on_ranks(2)
def test_a_state_that_one_rank_lacks_is_named_with_its_rank_on_every_rank(
    lacking: str, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    model, optimizer = trained(use_orig_params)
    expected = save(model, optimizer, FULL)[1]
    kept = {param: dict(row) for param, row in optimizer.state.items()}
    for lacks in (0, 1):
        partial = LACKING[lacking](model, optimizer) if rank == lacks else optimizer
        for run in SAVES.values():
            assert_refused(run, model, partial, [lacks])
        # Nothing is written, so there is nothing to load.
        assert_refused(lambda *both: save_checkpoint(tmp_path, *both), model, partial, [lacks])
        assert_refused(lambda *both: save_checkpoint(tmp_path, *both, background=True), model, partial, [lacks])
        assert load_checkpoint(tmp_path, model, optimizer) is None
        # Boxes are made without communication; torch compares what all of them cover when it writes them.
        states = in_form(SHARDED, ShardedOptimStateDictConfig(boxes=True))(model, partial)["state"]
        if lacking == "without_a_step":
            with pytest.raises(dcp.CheckpointException, match="invalid fill"):
                dcp.save({"state": states}, checkpoint_id=tmp_path / "boxes")
        optimizer.state.update({param: dict(row) for param, row in kept.items()})
    assert_equal(save(model, optimizer, FULL)[1], expected)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
@on_ranks(4)
def test_replicas_and_their_shard_groups_hear_of_a_state_that_one_rank_lacks(
    strategy: str, tmp_path: Path, rank: int
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    where = {"device_mesh": init_device_mesh("cpu", (2, 2))} if strategy == "HYBRID_SHARD" else {}
    model, optimizer = trained(True, strategy, **where)
    for lacks in ([3], [2, 3]):
        partial = without_a_step(model, optimizer) if rank in lacks else optimizer
        for run in (SAVES["full"], SAVES["full on rank 0"], lambda *both: save_checkpoint(tmp_path, *both)):
            assert_refused(run, model, partial, lacks)
    dist.barrier()
    save(model, optimizer, FULL)


@on_ranks(4)
def test_a_rank_without_elements_may_lack_states_in_a_checkpoint_too(tmp_path: Path, rank: int) -> None:
    model, optimizer = trained(True)
    expected = save(model, optimizer, FULL)[1]
    for param in [param for param in optimizer.state if param.numel() == 0]:
        del optimizer.state[param]
    save_checkpoint(tmp_path, model, optimizer)
    other, other_optimizer = trained(True)
    train(other, other_optimizer, TASKS["uneven"], range(1, 2))
    load_checkpoint(tmp_path, other, other_optimizer)
    for run in (SAVES["full"], SAVES["sharded"]):
        assert set(run(model, optimizer)["state"]) == set(expected["state"])
    assert_equal(save(other, other_optimizer, FULL)[1], expected)
