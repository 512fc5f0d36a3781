"""Ranks that save or load with other arguments than the others are told so, each with what every rank has passed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import iter_full_state_dict, load_checkpoint, load_full, save_checkpoint, save_full
from fsdp_flat.errors import RankMismatchError
from tests.differing_ranks.test_local_calls import BOTH, Trained
from tests.state_dict.kit import peer_quiet
from tests.support import assert_equal, on_ranks
from tests.support.wrapper_models import seeded, shard, whole_state

# Calls of a rank that has a number, and what each of ranks 0 and 1 is said to have passed.
SAVES: dict[str, tuple[Callable[[int, Any, Any, Path], object], str]] = {
    "step": (lambda rank, model, _, path: save_checkpoint(path, model, step=3 * rank), "step={}"),
    "a step on one rank": (
        lambda rank, model, _, path: save_checkpoint(path, model, step=3 if rank else None),
        "step={}",
    ),
    "background": (
        lambda rank, model, _, path: save_checkpoint(path, model, background=bool(rank)),
        "background={}",
    ),
    "an optimizer": (
        lambda rank, model, _, path: save_checkpoint(
            path, model, None if rank else torch.optim.SGD(model.parameters(), lr=0.1)
        ),
        "{} optimizer",
    ),
    "keep_last": (lambda rank, model, _, path: save_checkpoint(path, model, keep_last=1 + rank), "keep_last={}"),
    "dtype": (
        lambda rank, model, _, path: save_full(model, path, dtype=torch.bfloat16 if rank else torch.float16),
        "dtype={}",
    ),
    "spread": (lambda rank, model, _, path: save_full(model, path, spread=bool(rank)), "spread={}"),
    "max_file_bytes": (
        lambda rank, model, _, path: save_full(model, path, max_file_bytes=400 + rank),
        "max_file_bytes={}",
    ),
    "keep": (
        lambda rank, model, _, path: save_full(model, path, keep=lambda name: not rank or "last" in name),
        "the entry {}",
    ),
    "trainable_only of an iteration": (
        lambda rank, model, _, path: list(iter_full_state_dict(model, trainable_only=bool(rank))),
        "the entry {}",
    ),
    "dst": (lambda rank, model, _, path: list(iter_full_state_dict(model, dst=rank)), "dst={}"),
}
VALUES = {
    "step": (0, 3),
    "a step on one rank": (None, 3),
    "background": (False, True),
    "an optimizer": ("an", "no"),
    "keep_last": (1, 2),
    "dtype": (torch.float16, torch.bfloat16),
    "spread": (False, True),
    "max_file_bytes": (400, 401),
    "keep": ("'first.weight'", "'last.weight'"),
    "trainable_only of an iteration": ("'first.weight'", "'first.bias'"),
    "dst": (0, 1),
}


@pytest.mark.parametrize("what", SAVES)
@on_ranks(2)
def test_ranks_that_save_with_other_arguments_all_raise_and_nothing_is_written(
    what: str, tmp_path: Path, rank: int
) -> None:
    model = seeded()
    model.first.weight.requires_grad_(False)
    model = shard(model, use_orig_params=True)
    call, text = SAVES[what]
    first, other = (text.format(value) for value in VALUES[what])
    with pytest.raises(RankMismatchError) as caught:
        call(rank, model, None, tmp_path)
    assert f"rank 0 of the group has {first}, rank 1 has {other}." in str(caught.value)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@on_ranks(4)
def test_the_error_has_the_value_of_each_rank_that_differs_from_the_first(tmp_path: Path, rank: int) -> None:
    with pytest.raises(RankMismatchError) as caught:
        save_checkpoint(tmp_path, shard(seeded()), step=[5, 5, 6, 7][rank])
    assert "rank 0 of the group has step=5, rank 2 has step=6, rank 3 has step=7." in str(caught.value)


def saved_twice(folder: Path, rank: int) -> tuple[Any, Any]:
    """A model and its optimizer, of which there are two checkpoints, and full files of two kinds."""
    model = shard(seeded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("one", "two"):
        save_checkpoint(folder / name, model, optimizer, step=0)
        save_checkpoint(folder / name, model, optimizer, step=1)
        save_full(model, folder / f"full {name}")
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    save_full(nn.ModuleDict({"a": model, "b": shard(seeded(seed=1))}), folder / "both")
    return model, optimizer


LOADS: dict[str, tuple[Callable[[int, Any, Any, Path], object], str, str]] = {
    "step": (
        lambda rank, model, _, path: load_checkpoint(path / "one", model, step=rank),
        "step=0",
        "step=1",
    ),
    "an optimizer": (
        lambda rank, model, optimizer, path: load_checkpoint(path / "one", model, optimizer if rank else None),
        "no optimizer",
        "an optimizer",
    ),
    "another checkpoint": (
        lambda rank, model, _, path: load_checkpoint(path / ("two" if rank else "one"), model),
        "one",
        "two",
    ),
    "strict": (
        lambda rank, model, _, path: load_full(model, path / "full one", strict=bool(rank)),
        "strict=False",
        "strict=True",
    ),
    "prefix": (
        lambda rank, model, _, path: load_full(model, path / "both", prefix="b." if rank else "a."),
        "'first.weight' from 'a.first.weight'",
        "'first.weight' from 'b.first.weight'",
    ),
    "keep": (
        lambda rank, model, _, path: load_full(
            model, path / "full one", keep=lambda name: not rank or "last" in name, strict=False
        ),
        "'first.weight' from 'first.weight'",
        "'last.weight' from 'last.weight'",
    ),
    "other full files": (
        lambda rank, model, _, path: load_full(model, path / f"full {'two' if rank else 'one'}"),
        "full one of rank 0",
        "full two of rank 1",
    ),
}


@pytest.mark.parametrize("what", LOADS)
@on_ranks(2)
def test_ranks_that_load_something_else_all_raise_and_nothing_is_loaded(what: str, tmp_path: Path, rank: int) -> None:
    model, optimizer = saved_twice(tmp_path, rank)
    dist.barrier()
    before = whole_state(model)
    call, first, other = LOADS[what]
    with pytest.raises(RankMismatchError) as caught:
        call(rank, model, optimizer, tmp_path)
    assert first in str(caught.value)
    assert other in str(caught.value)
    assert_equal(whole_state(model), before)


@on_ranks(2)
def test_copies_of_one_checkpoint_in_folders_of_each_rank_are_loaded(tmp_path: Path, rank: int) -> None:
    """As on disks of several machines, under names of their own."""
    model = shard(seeded())
    save_checkpoint(tmp_path / "saved", model)
    save_full(model, tmp_path / "full")
    expected = whole_state(model)
    dist.barrier()
    for load, name in ((load_checkpoint, "saved"), (load_full, "full")):
        shutil.copytree(tmp_path / name, tmp_path / f"{name} of rank {rank}")
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load(*((tmp_path / f"{name} of rank {rank}", model)[:: 1 if name == "saved" else -1]))
        assert_equal(whole_state(model), expected)


@BOTH
@pytest.mark.parametrize("keeping", [0, 1])
@on_ranks(2)
def test_full_state_dicts_are_kept_on_the_ranks_that_ask_for_them(library: str, keeping: int, rank: int) -> None:
    """``rank0_only`` is an option of each rank: rank 1 may keep a full state dict too, or alone none."""
    with peer_quiet():
        one = Trained(library, rank, use_orig_params=True)
        expected, expected_states = one.saved()
        configs = one.library.FullStateDictConfig, one.library.FullOptimStateDictConfig
        options = [config(rank0_only=rank != keeping) for config in configs]
        with one.fsdp.state_dict_type(one.model, one.library.StateDictType.FULL_STATE_DICT, *options):
            state = {name: value.clone() for name, value in one.model.state_dict().items()}
            states = one.fsdp.optim_state_dict(one.model, one.optimizer)
    if rank in (0, keeping):
        assert_equal(state, expected)
        assert_equal(states["state"], expected_states["state"])
    else:
        assert state == states == {}
