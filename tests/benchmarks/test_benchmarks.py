"""The benchmarks run, at sizes where nothing they say means anything, and their tables hold what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import __main__ as bench
from benchmarks import functions, network, saves, scale, tables
from benchmarks.counting import Counter
from benchmarks.runner import where
from benchmarks.spec import IMPLEMENTATIONS, PRESETS, Setting
from benchmarks.states import measure_states
from benchmarks.worker import Training
from fsdp_flat.layout import clean_fqn
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


@on_ranks(4)
def test_the_counter_counts_what_a_rank_sends_in_a_part_of_the_ranks(rank: int) -> None:
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    with Counter() as counter:
        dist.all_reduce(torch.zeros(250), group=groups[rank % 2])
        dist.all_to_all_single(torch.zeros(250), torch.zeros(250), group=groups[rank % 2])
    assert counter.sent == 1000 + 500


@on_ranks(2)
def test_the_counter_counts_the_local_memory_of_dtensors_alone() -> None:
    mesh = init_device_mesh("cpu", (2,))
    # Without communication: threads of gloo release tensors when they can.
    kept = [DTensor.from_local(torch.ones(500), mesh, [Shard(0)])]
    with Counter() as counter:
        kept.append(kept[0] + 1)
        alive = counter.peak
    assert 2 * 2000 <= alive < 4000 + 1000


@pytest.mark.from_size("cover", "runs benchmarks, which start their ranks themselves")
def test_saves_of_both_ways_are_measured(tmp_path: Path) -> None:
    saves.main(["--ranks", "2", "--preset", "tiny", "--rounds", "1", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "saves.json").read_text())
    assert set(results["ranks"]["2"]) == set(saves.WAYS)
    assert all(0 < returned <= ended for returned, ended in results["ranks"]["2"].values())
    assert saves.saves_table(results) == (tmp_path / "saves.md").read_text()


def test_the_table_of_host_times_names_the_command_and_the_machine() -> None:
    row = {"world": 8, "units": 10, "held": 1e6}
    rows = [{"name": "local", "wrap": 0.0, "step": 1.0, **row}, {"name": "fsdp2", "wrap": 0.5, "step": 3.0, **row}]
    results = {"rows": rows, "command": "python -m benchmarks.scale", "where": where()}
    table = scale.scale_table(results)
    assert f"`python -m benchmarks.scale`.\n{tables.machine(results)}" in table
    assert f"| {IMPLEMENTATIONS['fsdp2']} | 10 | 8 | 50.00 | 200.000 | 1.0 |" in table


def test_a_small_setting_keeps_the_parameters() -> None:
    setting = Setting(batch=4, accumulate=2)
    assert (setting.small().batch, setting.small().accumulate, setting.small().width) == (1, 1, setting.width)


@pytest.mark.parametrize(
    "obstacle, text",
    [
        (mock.patch.object(network.shutil, "which", return_value=None), "the programs ip, tc, unshare, nsenter"),
        (mock.patch.object(network.os, "geteuid", return_value=1000), "root on Linux"),
    ],
)
def test_a_machine_that_can_make_no_hosts_says_what_it_needs(obstacle: Any, text: str) -> None:
    with obstacle, pytest.raises(network.NoNetworkError, match=text), network.two_hosts(1):
        pass


@pytest.mark.parametrize(
    "flags, preset, ranks",
    [
        ([], "compute", 2),
        (["--hosts", "2"], "communication", 4),
        (["--hosts", "2", "--preset", "tiny", "--ranks", "2"], "tiny", 2),
    ],
)
def test_two_hosts_are_measured_where_communication_takes_the_time(
    flags: list[str], preset: str, ranks: int, tmp_path: Path
) -> None:
    nothing: dict[str, Any] = {"rounds": [], "states": [], "counts": {}}
    with mock.patch.object(bench, "measure", return_value=nothing) as measure:
        path = bench.main([*flags, "--out", str(tmp_path)])
    setting = measure.call_args.args[1]
    assert (setting.width, setting.ranks) == (PRESETS[preset].width, ranks)
    assert path.name.startswith(preset)


def test_the_count_of_functions_sees_those_of_the_package_only_while_it_is_on() -> None:
    entered = functions.Entered()
    clean_fqn("a")
    assert not entered.calls
    entered.on()
    clean_fqn("a")
    entered.off()
    clean_fqn("a")
    assert {code.co_name: calls for code, calls in entered.calls.items()}["clean_fqn"] == 1


@on_ranks(2)
@pytest.mark.parametrize("front", functions.FRONTS)
def test_the_count_of_functions_is_on_in_forward_and_in_backward(front: str, rank: int) -> None:
    entered = functions.entered_in_steps(functions.FRONTS[front])
    named = {code.co_name for code in entered.calls}
    assert {"forward", "backward"} <= named or {"enter", "leave", "backward"} <= named
    assert functions.summary(entered).split()[1] == "functions"
