"""The benchmarks run, at sizes where nothing they say means anything, and their tables hold what was measured."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import __main__ as bench
from benchmarks import functions, memory, saves, tables
from benchmarks.counting import Counter
from benchmarks.spec import ALL, IMPLEMENTATIONS, Setting, peers_of
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
    assert all(IMPLEMENTATIONS[name].title in table for name in names)


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


def test_each_of_ours_is_compared_with_those_of_torch_that_keep_as_much() -> None:
    of_torch = {name for name in IMPLEMENTATIONS if name.startswith("fsdp")}
    kept = {"fsdp1-grad-op", "fsdp2-no-reshard"}
    assert set(peers_of("flat-full-orig", ALL)) == set(peers_of("flat-full-int8", ALL)) == of_torch - kept
    assert set(peers_of("flat-grad-op", ALL)) == kept
    assert peers_of("flat-hybrid", ALL) == ["fsdp1-hybrid"]
    assert peers_of("flat-fully-shard-budget", ALL) == ["fsdp2"]
    assert peers_of("fsdp2", ALL) == peers_of("local", ALL) == []


@on_ranks(2)
def test_every_kind_of_state_dict_is_saved_and_loaded_by_every_implementation_that_has_it(rank: int) -> None:
    setting = Setting(layers=1, width=16, heads=2, vocab=32, seq=8, batch=1)
    kinds = {f"{what} {form}" for what in ("model", "optimizer") for form in ("full", "sharded")}
    for name in ("flat-full-flat", "flat-full-orig", "fsdp2", "flat-fully-shard"):
        training = Training(IMPLEMENTATIONS[name], setting, rank)
        training.step()
        measured = measure_states(training.each, training.model, training.optimizer, repeats=1)
        assert set(measured) == kinds | {f"load {kind}" for kind in kinds}
        assert min(measured.values()) > 0


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


@pytest.mark.from_size("all", "runs a benchmark, which starts its ranks itself")
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


@pytest.mark.from_size("cover", "starts ranks, which import torch")
@pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
def test_a_row_of_the_memory_page_is_measured_and_planned() -> None:
    small = Setting(layers=2, width=16, heads=2, vocab=32, seq=8, batch=4, steps=1, warmup=1)
    (row,) = (row for row in memory.ROWS if row.title == "`FULL_SHARD`, bf16 compute")
    title, counted, planned, host, milliseconds = memory.memory_row(row, small)
    assert title == row.title
    assert min(map(float, (counted, planned, milliseconds))) >= 0
    assert host == ""
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert all(f"| {each.title} |" in page for each in memory.ROWS)
