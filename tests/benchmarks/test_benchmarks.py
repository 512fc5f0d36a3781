"""The benchmarks run, at sizes where nothing they say means anything, and their tables hold what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import __main__ as bench
from benchmarks import projection, report, tables
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


def test_a_run_writes_json_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["flat-full-orig"]
    path = bench.main([*SIZES, "--only", *names, "--out", str(tmp_path), "--name", "compute"])
    results = json.loads(path.read_text())
    assert list(results["rounds"][0]) == names
    assert all(row["step"] > 0 for row in results["rounds"][0].values())
    assert results["counts"]["flat-full-orig"]["sent"] >= report._lower_bound(results["setting"])
    table = (tmp_path / "compute.md").read_text()
    assert all(IMPLEMENTATIONS[name] in table for name in names)
    assert (tmp_path / "compute.png").stat().st_size > 1000
    report.main(["--results", str(tmp_path), "--out", str(tmp_path / "docs" / "page.md")])
    page = (tmp_path / "docs" / "page.md").read_text()
    assert "| 70B, 1024 GPUs |" in page
    assert IMPLEMENTATIONS["flat-full-orig"] in page


def test_state_dicts_are_compared_within_a_round_and_boxes_with_the_peers_chunks() -> None:
    rounds = [(2.0, 1.0, 0.5), (30.0, 3.0, 0.3), (4.0, 1.0, 0.2)]
    results = {
        "states": [
            {"fsdp1-full-orig": {"model sharded": peer}, "flat-full-orig": {"model sharded": own, "model boxes": boxes}}
            for peer, own, boxes in rounds
        ]
    }
    table = tables.states_table(results).splitlines()
    assert table[2:] == ["| model sharded | 4000.0 | 1000.0 | 0.25 |", "| model boxes |  | 300.0 | 0.05 |"]
    results["states"][1]["flat-full-orig"]["model boxes"] = "OSError: disk"
    assert tables.states_table(results).splitlines()[3] == "| model boxes |  | fails |  |"


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


@on_ranks(2)
def test_the_counter_sees_bytes_sent_and_bytes_that_come_back_under_a_storage(rank: int) -> None:
    kept = torch.zeros(1000)
    kept.untyped_storage().resize_(0)
    with Counter(2) as counter:
        alone = counter.peak
        dist.all_reduce(torch.zeros(250))
        kept.untyped_storage().resize_(4000)
        kept.zero_()
    assert counter.collectives == 1
    assert counter.sent == 1000
    assert alone == 0
    assert counter.peak >= 4000


def test_a_projected_step_is_never_faster_than_its_compute_or_its_network() -> None:
    assert projection.bytes_sent(8.0, 2, gather_itemsize=2, reduce_itemsize=4) == 32
    for model, compute, _, network, step, *_ in projection.projection_rows():
        assert float(step) >= max(float(compute), float(network)), model
    few, many = (projection.bytes_held(projection.MODELS[0], ranks) for ranks in (8, 1024))
    assert many < few


def test_a_small_setting_keeps_the_parameters() -> None:
    setting = Setting(batch=4, accumulate=2)
    assert (setting.small().batch, setting.small().accumulate, setting.small().width) == (1, 1, setting.width)
