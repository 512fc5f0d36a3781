"""The benchmarks run, at sizes where nothing they say means anything, and their tables hold what was measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import __main__ as bench
from benchmarks import gpu, micro, network, plans, projection, report, saves, scale, tables
from benchmarks.counting import Counter
from benchmarks.model import GPT
from benchmarks.runner import where
from benchmarks.spec import IMPLEMENTATIONS, PRESETS, Setting
from benchmarks.states import measure_states
from benchmarks.worker import Training
from fsdp_flat.checkpoint.dcp_files import SafeReader
from tests.support import assert_equal, on_ranks

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


def test_a_projected_step_is_never_faster_than_its_compute_or_its_network() -> None:
    assert projection.bytes_sent(8.0, 2, gather_itemsize=2, reduce_itemsize=4) == 32
    for model, compute, _, sending, step, *_ in projection.projection_rows():
        assert float(step) >= max(float(compute), float(sending)), model
    few, many = (projection.bytes_held(projection.MODELS[0], ranks) for ranks in (8, 1024))
    assert many < few


def test_plans_and_texts_of_every_rank_are_measured_and_are_on_the_page(tmp_path: Path) -> None:
    plans.main(["--ranks", "3", "--params", "2", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "plans.json").read_text())
    assert [count for _, _, count, _ in results["rows"]] == [3, 3, 3, 1, 3, 3, 3, 1, 3]
    sizes = {name: nbytes / count for name, nbytes, count, _ in results["rows"]}
    assert min(sizes["dcp.save: plans to rank 0"], sizes["save_checkpoint: texts to rank 0"]) > 500
    assert sizes["dcp.save, cached plans: plans to rank 0"] < sizes["dcp.save: plans to rank 0"] / 2
    assert plans.plans_table(results) in report.page(tmp_path)


def test_saves_of_both_ways_are_measured_and_are_on_the_page(tmp_path: Path) -> None:
    saves.main(["--ranks", "2", "--preset", "tiny", "--rounds", "1", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "saves.json").read_text())
    assert set(results["ranks"]["2"]) == set(saves.WAYS)
    assert all(0 < returned <= ended for returned, ended in results["ranks"]["2"].values())
    assert saves.saves_table(results) in report.page(tmp_path)


def test_plans_and_texts_lead_to_the_same_metadata(tmp_path: Path) -> None:
    found = []
    for measure in (partial(plans.measure_dcp, is_cached=False), plans.measure_texts):
        path = tmp_path / str(len(found))
        measure(3, 2, path)
        found.append(SafeReader(path).read_metadata())
    first, second = found
    assert len(first.state_dict_metadata) == 6
    assert first.state_dict_metadata == second.state_dict_metadata
    assert first.planner_data == second.planner_data
    assert first.storage_data == second.storage_data


def test_the_page_names_the_command_of_host_times_and_the_machine(tmp_path: Path) -> None:
    def results(command: str) -> str:
        row = {"world": 8, "units": 10, "held": 1e6}
        rows = [{"name": "local", "wrap": 0.0, "step": 1.0, **row}, {"name": "fsdp2", "wrap": 0.5, "step": 3.0, **row}]
        return json.dumps({"rows": rows, "command": command, "where": where()})

    (tmp_path / "scale.json").write_text(results("python -m benchmarks.scale"))
    assert scale.NO_GC_NOTE not in report.page(tmp_path)
    (tmp_path / "scale-no-gc.json").write_text(results("python -m benchmarks.scale --no-gc"))
    page = report.page(tmp_path)
    for command in ("python -m benchmarks.scale", "python -m benchmarks.scale --no-gc"):
        assert f"`{command}`.\n{tables.machine({'where': where()})}" in page
    assert page.count(f"| {IMPLEMENTATIONS['fsdp2']} | 10 | 8 | 50.00 | 200.000 | 1.0 |") == 2


def test_the_page_has_the_notes_of_the_benchmarks() -> None:
    page = (report.ROOT / "docs" / "performance.md").read_text()
    for note in (
        report.INTRO,
        report.STATES_NOTE,
        scale.NOTE,
        plans.NOTE,
        micro.NOTE,
        report.GPU_NOTE,
    ):
        assert note in page


def test_a_small_setting_keeps_the_parameters() -> None:
    setting = Setting(batch=4, accumulate=2)
    assert (setting.small().batch, setting.small().accumulate, setting.small().width) == (1, 1, setting.width)


# -- for one GPU, tried out on the CPU -------------------------------------------------------------------------------


def test_the_benchmark_for_a_gpu_runs_on_the_cpu_and_writes_json_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    gpu.main(["--device", "cpu", "--tiny", "--rounds", "1", "--world", "3", "--only", "flat-full-orig"])
    results = json.loads((tmp_path / "gpu-trial.json").read_text())
    assert results["world"] == 3
    row = results["rounds"][0]["flat-full-orig"]
    assert 0 < row["least"] <= row["step"]
    assert 0 < row["host_least"] <= row["host"]
    table = (tmp_path / "gpu-trial.md").read_text()
    assert IMPLEMENTATIONS["flat-full-orig"] in table
    assert table in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in gpu.LABELS if name != "flat-full-orig"])
def test_every_implementation_trains_in_the_benchmark_for_a_gpu(name: str) -> None:
    row = gpu.measure(name, gpu.TINY, "cpu", 4)
    assert row["step"] > 0
    assert row["parameters"] > 25_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_for_a_gpu_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_the_page_has_figures_of_a_gpu_only_if_they_were_taken_on_one(tmp_path: Path) -> None:
    (tmp_path / "gpu-trial.md").write_text("a trial")
    assert report.NO_GPU_NOTE in report.page(tmp_path)
    assert "a trial" not in report.page(tmp_path)
    (tmp_path / "gpu.md").write_text("a figure")
    assert "a figure" in report.page(tmp_path)
    assert report.NO_GPU_NOTE not in report.page(tmp_path)


def test_the_large_setting_has_a_billion_parameters() -> None:
    setting = gpu.LARGE
    with torch.device("meta"):
        model = GPT(setting)
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(1e9, rel=0.1)
    assert setting.bf16


def test_pretended_collectives_fill_a_whole_buffer_and_keep_values_under_the_names_of_every_torch() -> None:
    whole, own = torch.zeros(6), torch.tensor([1.0, 2.0])
    with gpu.pretended(3):
        before = dist.get_world_size()
        dist.all_gather_into_tensor(output_tensor=whole, input_tensor=own, group=None)
        assert_equal(whole, own.repeat(3))
        whole[:2] = 5.0
        dist.all_gather_into_tensor(whole, whole[:2]).wait()
        assert_equal(whole, torch.full((6,), 5.0))
        part = torch.zeros(2)
        dist.reduce_scatter_tensor(part, whole, group=None, async_op=True).wait()
        dist.reduce_scatter_tensor(output=part, input=whole)
        assert_equal(part, torch.full((2,), 5.0))
    assert before == 3
    assert not dist.is_initialized()


def test_figures_of_a_gpu_are_compared_within_a_round_with_the_best_of_the_same_resharding() -> None:
    def row(step: float, host: float, peak: int = 1_000_000) -> dict[str, float]:
        figures = {"step": step, "least": step / 2, "host": host, "host_least": host}
        return {**figures, "peak": peak, "reserved": 2 * peak, "held": peak, "drift": 0, "parameters": 10}

    results = {
        "setting": {"layers": 3},
        "rounds": [
            {
                "local": row(scale, 0.002),
                "fsdp1-full-orig": row(4 * scale, 0.5),
                "fsdp2": row(3 * scale, 0.6),
                "fsdp2-no-reshard": row(scale, 0.1),
                "flat-full-orig": row(1.5 * scale, 0.01, 3_000_000),
            }
            for scale in (1.0, 100.0, 2.0)
        ],
    }
    lines = gpu.gpu_table(results).splitlines()
    assert lines[2].startswith("| no communication | 2000.0 | 500.0 | 1.00 |  |")
    expected = "3000.0 | 750.0 | 1.50 | 0.50 | 10.0 | 0.02 | 2.000 | 3 | 3.00 | 6 | 3.0 | 0.0 |"
    assert lines[-1] == f"| {IMPLEMENTATIONS['flat-full-orig']} | {expected}"


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
