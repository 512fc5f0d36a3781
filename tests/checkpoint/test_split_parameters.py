"""Checkpoints of models that tensor parallelism has split too: whole tensors, whoever reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    register_optim_state_handler,
    save_checkpoint,
    save_full,
)
from fsdp_flat.errors import UnsupportedError
from tests.support import Ranks, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.tensor_parallel.test_tensor_parallel import (
    LAYERS,
    LAYOUTS,
    adamw,
    grid,
    net,
    of_uneven_parts,
    on_grid,
    step_of_both,
)

RanksOf = Callable[..., Ranks]
BOXES = (ShardedStateDictConfig(boxes=True), ShardedOptimStateDictConfig(boxes=True))


def trained(layout: str, use_orig_params: bool, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    mesh = grid()
    model = on_grid(net(seed), mesh, layout, use_orig_params=use_orig_params)
    optimizer = adamw(model)
    step_of_both(model, optimizer, net(seed), adamw(net(seed)), mesh, 0)
    return model, optimizer


def whole(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return dict(model.state_dict()), FSDP.optim_state_dict(model, optimizer)["state"]


@ORIG_PARAMS
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_boxes_of_split_parameters_make_up_the_whole_ones(layout: str, use_orig_params: bool, tmp_path: Path) -> None:
    model, optimizer = trained(layout, use_orig_params)
    expected, states = whole(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *BOXES):
        boxed = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)["state"]}
    dcp.save(boxed, checkpoint_id=tmp_path)
    averages = {name: {"exp_avg": row["exp_avg"]} for name, row in states.items()}
    read: dict[str, Any] = {"model": net(seed=5).state_dict(), "optim": copy.deepcopy(averages)}
    for row in read["optim"].values():
        row["exp_avg"].zero_()
    dcp.load(read, checkpoint_id=tmp_path)
    assert_equal(dict(read["model"]), expected)
    assert_equal(read["optim"], averages)


@pytest.mark.parametrize("out_features", [1, 3, 5])
@ORIG_PARAMS
@on_ranks(4)
def test_parts_of_uneven_size_go_through_every_kind_of_file(
    use_orig_params: bool, out_features: int, tmp_path: Path
) -> None:
    plain, model = of_uneven_parts(out_features, use_orig_params=use_orig_params)
    expected = dict(plain.state_dict())
    save_checkpoint(tmp_path / "own", model)
    save_full(model, tmp_path / "full")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_checkpoint(tmp_path / "own", model)
    assert_equal(dict(model.state_dict()), expected)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_full(model, tmp_path / "full")
    assert_equal(dict(model.state_dict()), expected)


@ORIG_PARAMS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_of_a_grid_is_loaded_by_a_grid_and_without_tensor_parallelism(
    ranks: RanksOf, tmp_path: Path, layout: str, use_orig_params: bool, background: bool
) -> None:
    expected = ranks(4).run(save_on_grid, str(tmp_path), layout, use_orig_params, background)
    for found in (
        *ranks(4).run(load_on_grid, str(tmp_path), LAYOUTS[layout == LAYOUTS[0]], not use_orig_params),
        *ranks(2).run(load_without_grid, str(tmp_path), use_orig_params),
    ):
        assert_equal(found, expected[0])


def save_on_grid(path: str, layout: str, use_orig_params: bool, background: bool) -> Any:
    model, optimizer = trained(layout, use_orig_params)
    save_checkpoint(path, model, optimizer, {"rank": dist.get_rank()}, background=background).wait()
    return whole(model, optimizer)


def load_on_grid(path: str, layout: str, use_orig_params: bool) -> Any:
    model, optimizer = trained(layout, use_orig_params, seed=3)
    found = load_checkpoint(path, model, optimizer)
    assert found is not None
    assert found.extra == {"rank": dist.get_rank()}
    return whole(model, optimizer)


def load_without_grid(path: str, use_orig_params: bool) -> Any:
    model = FSDP(net(seed=4), auto_wrap_policy=LAYERS, use_orig_params=use_orig_params)
    optimizer = adamw(model)
    load_checkpoint(path, model, optimizer)
    return whole(model, optimizer)


@ORIG_PARAMS
@pytest.mark.parametrize("spread", [False, True])
@on_ranks(4)
def test_files_of_whole_parameters_are_written_once_and_loaded_in_parts(
    use_orig_params: bool, spread: bool, tmp_path: Path
) -> None:
    model, optimizer = trained("tensor", use_orig_params)
    expected = whole(model, optimizer)[0]
    save_full(model, tmp_path, max_file_bytes=600, spread=spread)
    plain = FSDP(net(seed=6), auto_wrap_policy=LAYERS, use_orig_params=True)
    load_full(plain, tmp_path)
    assert_equal(dict(plain.state_dict()), expected)
    other, _ = trained("sequence", not use_orig_params, seed=7)
    load_full(other, tmp_path)
    assert_equal(dict(other.state_dict()), expected)


@ORIG_PARAMS
@on_ranks(4)
def test_split_parameters_are_streamed_whole(use_orig_params: bool) -> None:
    model, optimizer = trained("tensor", use_orig_params)
    expected = whole(model, optimizer)[0]
    rank_group = model._unit.options.groups.shard
    for dst in (0, 1, None):
        found = dict(iter_full_state_dict(model, dst=dst))
        has = dst is None or rank_group.rank == dst
        assert_equal(found, expected if has else dict.fromkeys(expected))


@on_ranks(4)
def test_a_handler_of_a_state_of_a_split_parameter_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = trained("tensor", True)
    register_optim_state_handler(
        model, "exp_avg", merge=lambda parts, shape: parts[0].tensor, split=lambda whole, *_: whole
    )
    for save in (
        lambda: save_checkpoint(tmp_path, model, optimizer),
        lambda: FSDP.optim_state_dict(model, optimizer),
    ):
        with pytest.raises(UnsupportedError, match="tensor parallelism has split this one first"):
            save()
