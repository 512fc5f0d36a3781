"""States that some rank's optimizer lacks are an error on every rank and are never filled in."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_flat import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    load_checkpoint,
    save_checkpoint,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import OptionError, OptionTypeError, PeerFailureError
from tests.state_dict.kit import FULL, LOCAL, SHARDED, TASKS, save, train
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.patience import SECONDS
from tests.support.wrapper_models import seeded, shard

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
    # Both ranks have elements of this one; an entry that no other rank could have is not missed.
    names = dict(model.named_parameters())
    cut = next(
        param for name, param in names.items() if "blocks.1" in name and name.endswith(("up.bias", "_flat_param"))
    )
    del optimizer.state[cut]["exp_avg_sq"]
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


@ORIG_PARAMS
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
        assert_refused(lambda *both: save_checkpoint(tmp_path / "run", *both), model, partial, [lacks])
        assert_refused(lambda *both: save_checkpoint(tmp_path / "run", *both, background=True), model, partial, [lacks])
        assert load_checkpoint(tmp_path / "run", model, optimizer) is None
        # Boxes are made without communication; torch compares what all of them cover when it writes them.
        states = in_form(SHARDED, ShardedOptimStateDictConfig(boxes=True))(model, partial)["state"]
        if lacking == "without_a_step":
            with pytest.raises(dcp.CheckpointException, match="invalid fill"):
                dcp.save({"state": states}, checkpoint_id=tmp_path / "boxes")
        optimizer.state.update({param: dict(row) for param, row in kept.items()})
    assert_equal(save(model, optimizer, FULL)[1], expected)


@pytest.mark.parametrize("how", ["names", "optimizer", "state dict"])
@on_ranks(2)
def test_a_malformed_optimizer_of_one_rank_is_an_error_on_every_rank_at_once(how: str, rank: int) -> None:
    model, optimizer = trained(True)
    given: Any = optimizer
    state_dict: Any = optimizer.state_dict()
    if rank and how == "names":
        optimizer.state[held(model, optimizer)][1] = torch.zeros(1)
        state_dict = None
    elif rank:
        given, state_dict = (object(), None) if how == "optimizer" else (optimizer, {"state": [1]})
    for kind in (FULL, SHARDED):
        start = time.monotonic()
        with (
            FSDP.state_dict_type(model, kind),
            pytest.raises((OptionError, OptionTypeError) if rank else PeerFailureError, match=r"names \[|param_groups"),
        ):
            FSDP.optim_state_dict(model, given, state_dict)
        assert time.monotonic() - start < SECONDS


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


@ORIG_PARAMS
@on_ranks(2)
def test_boxes_name_the_states_that_this_rank_lacks_though_it_has_others(use_orig_params: bool, rank: int) -> None:
    run = in_form(SHARDED, ShardedOptimStateDictConfig(boxes=True))
    model, optimizer = trained(use_orig_params)
    run(model, optimizer)
    run(model, torch.optim.Adam(model.parameters()))
    if rank == 1:
        cut = held(model, optimizer)
        del optimizer.state[cut]
        with pytest.warns(UserWarning, match=r"of rank 1 has states, but none of 'blocks\.1\..* of unit 'blocks\.1'.*"):
            run(model, optimizer)
    else:
        run(model, optimizer)


# ------------------------------------------------------------------------- optimizers of non-empty slices, and names


def of_slices(model: Model, *, named: bool = False, num_groups: int = 1) -> Optimizer:
    """An optimizer of the parameters that this rank has elements of, in one group or by weights and biases."""
    held = [(name, param) for name, param in model.named_parameters() if param.numel()]
    by_kind = [[it for it in held if it[0].endswith(kind)] for kind in (("weight", "bias"), "weight", "bias")]
    chosen = by_kind[:1] if num_groups == 1 else by_kind[1:]
    groups = [{"params": it if named else [param for _, param in it], "lr": 0.1 / 2**i} for i, it in enumerate(chosen)]
    return torch.optim.Adam(groups)


def stepped(seed: int, *, named: bool = False, num_groups: int = 1, **wrapping: Any) -> tuple[Model, Optimizer]:
    model = shard(seeded(seed=seed), **wrapping)
    optimizer = of_slices(model, named=named, num_groups=num_groups)
    train(model, optimizer, TASKS["uneven"], range(seed, seed + 1))
    return model, optimizer


@pytest.mark.parametrize("num_groups", [1, 2])
@on_ranks(2)
def test_an_optimizer_of_non_empty_slices_resumes_under_another_wrapping(num_groups: int, tmp_path: Path) -> None:
    model, optimizer = stepped(0, use_orig_params=True, num_groups=num_groups)
    names = [name for name, _ in seeded().named_parameters()]
    save_checkpoint(tmp_path, model, optimizer)
    expected = save(model, optimizer, FULL)[1]
    assert sorted(name for group in expected["param_groups"] for name in group["params"]) == sorted(names)
    for kind in (FULL, SHARDED):
        states = save(model, optimizer, kind)[1]
        for wrapping in ({"use_orig_params": True, "by_blocks": False}, {"use_orig_params": True}):
            other, other_optimizer = stepped(1, num_groups=num_groups, **wrapping)
            with FSDP.state_dict_type(other, kind):
                other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, states))
            assert_equal(save(other, other_optimizer, FULL)[1]["state"], expected["state"])
    other, other_optimizer = stepped(1, num_groups=num_groups, use_orig_params=True, by_blocks=False)
    load_checkpoint(tmp_path, other, other_optimizer)
    assert_equal(save(other, other_optimizer, FULL)[1]["state"], expected["state"])
    assert [group["lr"] for group in other_optimizer.param_groups] == [0.1, 0.05][:num_groups]


def save_slices(path: str) -> Any:
    model, optimizer = stepped(0, use_orig_params=True)
    save_checkpoint(path, model, optimizer)
    return save(model, optimizer, FULL)[1]["state"]


def load_slices(path: str) -> Any:
    model, optimizer = stepped(1, use_orig_params=True)
    load_checkpoint(path, model, optimizer)
    return save(model, optimizer, FULL)[1]["state"]


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_an_optimizer_of_non_empty_slices_resumes_on_another_number_of_ranks(
    ranks: Any, sizes: tuple[int, int], tmp_path: Path
) -> None:
    saved, loaded = (
        ranks(size).run(run, str(tmp_path)) for size, run in zip(sizes, (save_slices, load_slices), strict=True)
    )
    assert_equal(loaded[0], saved[0])


@on_ranks(2)
def test_saved_groups_hold_plain_names_and_a_load_leaves_the_optimizer_its_own() -> None:
    model, optimizer = stepped(0, named=True, use_orig_params=True)
    own = [list(group["param_names"]) for group in optimizer.param_groups]
    for kind in (FULL, SHARDED):
        states = save(model, optimizer, kind)[1]
        assert states["param_groups"][0]["param_names"] == states["param_groups"][0]["params"]
        assert sorted(states["param_groups"][0]["params"]) == sorted(dict(seeded().named_parameters()))
        with FSDP.state_dict_type(model, kind):
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
        assert [group["param_names"] for group in optimizer.param_groups] == own
        plain = torch.optim.Adam(seeded().named_parameters())
        if kind is FULL:
            plain.load_state_dict(FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, seeded()))
