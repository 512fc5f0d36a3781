"""Checkpoints are listed and verified without a model; names that do not match are told once, with what maps them."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import (
    FullyShardedDataParallel,
    list_checkpoints,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
    verify_checkpoint,
)
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError
from fsdp_flat.layout import misfits
from tests.support import assert_equal, on_ranks
from tests.support.wrapper_models import seeded, shard, whole_state


@on_ranks(2)
def test_checkpoints_are_listed_newest_first_with_what_is_wrong_with_them(tmp_path: Path, rank: int) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    model = shard(seeded())
    for step in (3, 20, 7):
        save_checkpoint(tmp_path, model, step=step)
    dist.barrier()
    found = list_checkpoints(str(tmp_path))
    assert [(each.step, each.problem) for each in found] == [(7, ""), (20, ""), (3, "")]
    assert found[0].path == tmp_path / "step-00000007"
    files = [path for path in found[0].path.iterdir() if path.name != "commit.json"]
    assert found[0].nbytes == sum(path.stat().st_size for path in files)
    dist.barrier()
    if rank == 0:
        (tmp_path / "step-00000020" / "__1_0.distcp").unlink()
        (tmp_path / "step-00000003" / "commit.json").write_text("{")
    dist.barrier()
    found = list_checkpoints(tmp_path)
    assert [each.step for each in found] == [7, 3, 20]
    assert "commit.json cannot be read" in found[1].problem
    assert found[2].problem.endswith("__1_0.distcp does not exist.")
    with pytest.raises(OptionTypeError, match="directory must be a path"):
        list_checkpoints(None)


@on_ranks(2)
def test_a_verified_checkpoint_is_described_and_an_altered_one_is_an_error(tmp_path: Path, rank: int) -> None:
    path = save_checkpoint(tmp_path, shard(seeded()), step=5).wait()
    assert verify_checkpoint(path) == list_checkpoints(tmp_path)[0]
    dist.barrier()
    if rank == 0:
        data = bytearray((path / "__1_0.distcp").read_bytes())
        data[len(data) // 2] ^= 1
        (path / "__1_0.distcp").write_bytes(data)
    dist.barrier()
    assert list_checkpoints(tmp_path)[0].problem == "", "contents are not read"
    with pytest.raises(LoadError, match=r"__1_0.distcp was altered"):
        verify_checkpoint(path)
    with pytest.raises(LoadError, match=r"step-00000006 does not exist; checkpoints there: 5"):
        verify_checkpoint(tmp_path / "step-00000006")
    with pytest.raises(LoadError, match=r"is a folder of checkpoints; pass one of them, as .*step-00000005"):
        verify_checkpoint(tmp_path)


@pytest.mark.parametrize("asked", [None, True])
@on_ranks(2)
def test_progress_is_silent_without_tqdm_and_where_output_is_no_terminal(
    asked: bool | None, tmp_path: Path, rank: int
) -> None:
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(shown):
        if asked:
            patch.setitem(sys.modules, "tqdm", None)
        model = shard(seeded())
        save_checkpoint(tmp_path / "run", model, progress=asked)
        save_full(model, tmp_path / "full", progress=asked)
        load_checkpoint(tmp_path / "run", model, progress=asked)
    assert shown.getvalue() == ""


@on_ranks(2)
def test_a_load_shows_how_much_it_has_verified(tmp_path: Path, rank: int) -> None:
    pytest.importorskip("tqdm", reason="draws the bar")
    model, shown = shard(seeded()), io.StringIO()
    path = save_checkpoint(tmp_path, model).wait()
    with contextlib.redirect_stderr(shown):
        load_checkpoint(tmp_path, model, progress=True)
    assert ("Verifying: 100%" in shown.getvalue()) == (rank == 0)
    with contextlib.redirect_stderr(shown):
        verify_checkpoint(path, progress=True)
    assert "Verifying: 100%" in shown.getvalue()


def test_names_are_told_once_with_the_nearest_match_first() -> None:
    missing = ["norm.scale", "head.weight", "layers.0.attn.q.weight"]
    unexpected = ["layers.0.attn.wq.weight", "zzz", "head.weights"]
    assert misfits(missing, unexpected) == [
        "missing: 'layers.0.attn.q.weight' (there is 'layers.0.attn.wq.weight'), "
        "'head.weight' (there is 'head.weights'), 'norm.scale'",
        "not in the model: 'zzz'",
    ]
    assert misfits([], []) == []
    assert misfits([f"a{i}" for i in range(7)], []) == ["missing: 'a0', 'a1', 'a2', 'a3', 'a4' and 2 more"]


def written(path: Path, names: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        torch.save(names, path)
    dist.barrier()


@on_ranks(2)
def test_a_file_whose_names_have_a_prefix_is_loaded_by_the_argument_that_the_error_names(
    tmp_path: Path, rank: int
) -> None:
    state = dict(seeded(seed=3).state_dict())
    written(tmp_path / "full.pt", {**{f"model.{name}": value for name, value in state.items()}, "head": torch.ones(2)})
    model = shard(seeded())
    before = whole_state(model)
    text = f"load_full(..., prefix='model.') would find {len(state)} names missing now"
    with pytest.raises(LoadError, match=re.escape(f"{text}; not in the model: 'head'. Nothing")) as caught:
        load_full(model, tmp_path / "full.pt")
    assert "last.bias" not in str(caught.value), "names that the argument maps are not listed"
    assert_equal(whole_state(model), before)
    assert load_full(model, tmp_path / "full.pt", prefix="model.") == ([], [])
    assert_equal(whole_state(model), state)


@on_ranks(2)
def test_a_model_whose_names_have_a_prefix_is_loaded_by_the_function_that_the_error_names(
    tmp_path: Path, rank: int
) -> None:
    state = dict(seeded(seed=3).state_dict())
    written(tmp_path / "part.pt", state)
    model = nn.ModuleDict({"inner": FullyShardedDataParallel(seeded())})
    text = f"load_full(..., rename=lambda name: 'inner.' + name) would find {len(state)} names"
    with pytest.raises(LoadError, match=re.escape(text)):
        load_full(model, tmp_path / "part.pt")
    assert load_full(model, tmp_path / "part.pt", rename=lambda name: "inner." + name) == ([], [])
    assert_equal(whole_state(model["inner"]), state)


@on_ranks(2)
def test_names_that_a_function_leaves_out_are_not_loaded_and_bad_functions_are_named(tmp_path: Path, rank: int) -> None:
    state = dict(seeded(seed=3).state_dict())
    written(tmp_path / "more.pt", {**state, "head": torch.ones(2)})
    model = shard(seeded())
    load_full(model, tmp_path / "more.pt", rename=lambda name: None if name == "head" else name)
    assert_equal(whole_state(model), state)
    with pytest.raises(OptionError, match=r"rename gives the name 'last.bias' to '.*' and to '.*' of the file"):
        load_full(model, tmp_path / "more.pt", rename=lambda name: "last.bias")
    with pytest.raises(OptionTypeError, match="prefix must be a str, and rename a function"):
        load_full(model, tmp_path / "more.pt", rename="inner.")
    assert_equal(whole_state(model), state)
