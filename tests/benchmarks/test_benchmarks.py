"""The benchmarks run, at sizes where nothing they say means anything, and their tables hold what was measured."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import __main__ as bench
from benchmarks import functions, saves, tables
from benchmarks.counting import Counter
from benchmarks.spec import IMPLEMENTATIONS, Setting
from benchmarks.states import measure_states
from benchmarks.worker import Training
from tests.support import on_ranks

SIZES = [
    word
    for key, value in Setting(1, 16, 2, 32, 8, 1, steps=2, warmup=1).__dict__.items()
    if value is not False
    for word in (f"--{key}", str(value))
] + ["--rounds", "1"]


@pytest.mark.from_size("cover", "runs benchmarks, which start their ranks themselves")
def test_a_run_writes_json_and_a_table(tmp_path: Path) -> None:
    names = ["flat-full-orig"]
    path = bench.main([*SIZES, "--only", *names, "--out", str(tmp_path), "--name", "compute"])
    results = json.loads(path.read_text())
    assert list(results["rounds"][0]) == names
    assert all(row["step"] > 0 for row in results["rounds"][0].values())
    assert results["counts"]["flat-full-orig"]["sent"] > 0
    table = (tmp_path / "compute.md").read_text()
    assert all(IMPLEMENTATIONS[name] in table for name in names)


def test_ratios_are_taken_within_a_round_against_the_fastest_of_the_others() -> None:
    results = {
        "rounds": [
            {"local": {"step": 1.0}, "flat-full-orig": {"step": 2.0}, "fsdp2": {"step": 5.0}},
            {"local": {"step": 10.0}, "flat-full-orig": {"step": 30.0}, "fsdp2": {"step": 5.0}},
            {"local": {"step": 2.0}, "flat-full-orig": {"step": 5.0}, "fsdp2": {"step": 5.0}},
        ]
    }
    assert tables.ratios(results, "flat-full-orig", ["local"]) == 2.5
    assert tables.ratios(results, "flat-full-orig", ["local", "fsdp2"]) == 2.5
    assert tables.ratios(results, "flat-full-orig", ["ddp"]) is None
    assert tables.medians(results)["local"] == {"step": 2.0}


@on_ranks(2)
def test_every_kind_of_state_dict_is_saved_and_loaded_by_every_implementation_that_has_it(rank: int) -> None:
    setting = Setting(layers=1, width=16, heads=2, vocab=32, seq=8, batch=1)
    for name in ("flat-full-flat", "flat-full-orig"):
        training = Training(name, setting, rank)
        training.step()
        measured = measure_states(name, training.model, training.optimizer, repeats=1)
        assert {key for key, value in measured.items() if isinstance(value, str)} == set()
        kinds = {f"{what} {form}" for what in ("model", "optimizer") for form in ("full", "sharded", "boxes")}
        kinds |= {"model local"} if name.endswith("flat") else set()
        kinds |= {f"load {kind}" for kind in kinds} | {"model full, rank 0", "optimizer full, rank 0"}
        assert set(measured) == kinds
    of_fully_shard = []
    for name in ("fsdp2", "flat-fully-shard"):
        training = Training(name, setting, rank)
        training.step()
        measured = measure_states(name, training.model, training.optimizer, repeats=1)
        assert {key for key, value in measured.items() if isinstance(value, str)} == set()
        of_fully_shard.append(set(measured))
    assert of_fully_shard[0] == of_fully_shard[1]
    assert {"model sharded", "load model, the module's own"} <= of_fully_shard[0]


@on_ranks(2)
def test_the_counter_sees_bytes_sent_and_bytes_that_come_back_under_a_storage(rank: int) -> None:
    kept = torch.zeros(1000)
    kept.untyped_storage().resize_(0)
    with Counter() as counter:
        alone = counter.peak
        dist.all_reduce(torch.zeros(250))
        kept.untyped_storage().resize_(4000)
        kept.zero_()
    assert counter.collectives == 1
    assert counter.sent == 1000
    assert alone == 0
    assert counter.peak >= 4000


@pytest.mark.from_size("cover", "runs benchmarks, which start their ranks themselves")
def test_saves_of_both_ways_are_measured(tmp_path: Path) -> None:
    saves.main(["--ranks", "2", "--preset", "tiny", "--rounds", "1", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "saves.json").read_text())
    assert set(results["ranks"]["2"]) == set(saves.WAYS)
    assert all(0 < returned <= ended for returned, ended in results["ranks"]["2"].values())
    assert saves.saves_table(results) == (tmp_path / "saves.md").read_text()


@on_ranks(2)
@pytest.mark.parametrize("front", functions.FRONTS)
def test_the_count_of_functions_is_on_in_forward_and_in_backward(front: str, rank: int) -> None:
    entered = functions.entered_in_steps(functions.FRONTS[front])
    named = {code.co_name for code in entered.calls}
    assert {"forward", "backward"} <= named or {"enter", "leave", "backward"} <= named
    assert functions.summary(entered).split()[1] == "functions"


OURS = 6


@on_ranks(2)
def test_the_functions_of_each_save_and_load_are_counted_apart(tmp_path: Path) -> None:
    found = dict(islice(functions.entered_in_states(str(tmp_path)), OURS))
    named = {title: {code.co_name for code in entered.calls} for title, entered in found.items()}
    for kind, expected in {
        "a FULL state dict": "save_model",
        "an optimizer's state dict": "save_optim_state",
        "a load of a FULL state dict": "load_unit",
        "a load of an optimizer's state dict": "load_optim_state",
        "a checkpoint": "save_checkpoint",
        "a load of a checkpoint": "load_checkpoint",
    }.items():
        title = f"{kind}, use_orig_params=False"
        assert expected in named[title]
        assert functions.summary(found[title], 1).split()[1] == "functions"
    assert "save_checkpoint" not in named["a load of a checkpoint, use_orig_params=False"]
