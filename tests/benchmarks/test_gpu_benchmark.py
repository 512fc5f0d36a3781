"""The benchmark for one GPU: its rows run on the CPU at sizes where nothing means anything, and its parts are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu
from benchmarks.gpu_rows import FEW, IMPLEMENTATIONS, ROWS, next_to_run
from benchmarks.link import HostStreams, Link, pretended
from benchmarks.spec import peers_of
from fsdp_flat.comm import torch_comm
from tests.support import assert_equal

# -- rows, tried out on the CPU --------------------------------------------------------------------------------------

KINDS = ["fsdp1-orig", "fsdp2", "flat-orig", "flat-fully-shard"]


@pytest.mark.parametrize("key", ROWS)
def test_every_row_trains_torchs_and_our_implementations(key: str) -> None:
    row = ROWS[key].tiny()
    sent = {}
    for name in KINDS:
        found = gpu.measure(name, row, "cpu", 4)
        assert found["step"] > 0
        assert found["parameters"] > 10_000
        sent[name] = found["sent"]
    # torch's FSDP1 has another all-gather on CPUs. Ours sends less than FSDP2: it keeps the last units until backward.
    assert 0 < sent["flat-orig"] <= sent["flat-fully-shard"] <= sent["fsdp2"], sent


def test_a_trial_writes_json_and_tables_with_the_method_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    flags = ["--device", "cpu", "--tiny", "--rounds", "1", "--world", "3", "--rows", "1.2B", "1.2B-60"]
    gpu.main([*flags, "--gbps", "7", "--only", "flat-orig", "fsdp2"])
    results = json.loads((tmp_path / "gpu-trial.json").read_text())
    assert results["world"] == 3
    assert [row["gbps"] for row in results["rows"].values()] == [7.0, 7.0]
    figures = results["rows"]["1.2B-60"]["rounds"][0]["flat-orig"]
    assert 0 < figures["least"] <= figures["step"]
    text = (tmp_path / "gpu-trial.md").read_text()
    first = text.splitlines()[0]
    for part in ("CPU", torch.__version__, "`python -m benchmarks.gpu --device cpu", "communication emulated"):
        assert part in first
    assert "**1.2B, 7 GB/s, 1 round**" in text
    assert f"| {IMPLEMENTATIONS['flat-orig'].title} |" in text
    said = capsys.readouterr().out
    assert first in said
    assert gpu.row_text(results["rows"]["1.2B-60"]) in said


def test_with_a_limit_the_rows_of_most_weight_are_measured_and_the_others_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gpu, "measure", lambda *_: figures(1.0))
    rows = ["--rows", "1.2B-60", "1.2B", "0.24B"]
    gpu.main(["--device", "cpu", "--tiny", "--minutes", "1", "--out", str(tmp_path), *rows])
    results = json.loads((tmp_path / "gpu-trial.json").read_text())
    # Each look at the clock is 10 s later, so a row takes 10 s where 4 s are expected: two rows of three fit in 60 s.
    assert list(results["rows"]) == ["1.2B-60", "1.2B"]
    assert list(results["rows"]["1.2B-60"]["rounds"][0]) == list(FEW)
    said = capsys.readouterr().out
    assert said.index("**1.2B, 60 GB/s, 1 round**") < said.index("-- 1.2B\n"), "a row's table comes before the next row"
    assert "1 minutes are too short for them: 0.24B." in said


def test_the_next_to_run_is_the_first_that_fits_of_those_that_ran_least() -> None:
    seconds = {"heavy": 60.0, "long": 200.0, "light": 10.0}
    assert next_to_run({"heavy": 0, "long": 0, "light": 0}, seconds, 300.0) == "heavy"
    assert next_to_run({"heavy": 1, "long": 0, "light": 0}, seconds, 240.0, most=3) == "long"
    assert next_to_run({"heavy": 1, "long": 0, "light": 0}, seconds, 199.0, most=3) == "light"
    assert next_to_run({"heavy": 1, "long": 0, "light": 1}, seconds, 100.0, most=3) == "heavy", "a second round"
    assert next_to_run({"heavy": 1, "long": 0, "light": 1}, seconds, 100.0) is None
    assert next_to_run({"heavy": 0, "long": 0, "light": 0}, seconds, 9.9) is None


# -- the emulated link -----------------------------------------------------------------------------------------------


def test_collectives_run_in_order_on_one_stream_each_for_its_bytes() -> None:
    streams = HostStreams()
    # 1 GB/s among 4 ranks: 3/4 of the bytes of the full buffer, 1e-9 s each.
    link = Link(4, 1.0, streams)
    compute, other = streams.current, streams.new()
    full, own = torch.zeros(1000), torch.ones(250)
    seconds = 3000e-9
    streams.spin(1.0)
    first = link.all_gather(full, own, async_op=True)
    assert link.stream.seconds == pytest.approx(1.0 + seconds), "it starts after what was issued before"
    with streams.on(other):
        second = link.reduce_scatter(torch.zeros(250), full, async_op=True)
        assert link.stream.seconds == pytest.approx(1.0 + 2 * seconds), "it waits for the one before"
        assert other.seconds == 0.0, "the current stream goes on"
        assert second is not None
        second.wait()
        assert other.seconds == pytest.approx(1.0 + 2 * seconds), "until it waits"
    assert compute.seconds == 1.0
    assert first is not None
    first.wait()
    assert compute.seconds == pytest.approx(1.0 + seconds), "for its own collective, not for the later one"
    assert link.nbytes == 6000.0


def test_collectives_fill_a_whole_buffer_and_keep_values_under_the_names_of_every_torch() -> None:
    whole, own = torch.zeros(6), torch.tensor([1.0, 2.0])
    before = torch_comm.all_gather_single
    with pretended(3) as link:
        assert dist.get_world_size() == 3
        dist.all_gather_into_tensor(output_tensor=whole, input_tensor=own, group=None)
        assert_equal(whole, own.repeat(3))
        whole[:2] = 5.0
        dist.all_gather_into_tensor(whole, whole[:2], async_op=True).wait()
        assert_equal(whole, torch.full((6,), 5.0))
        part = torch.zeros(2)
        dist.reduce_scatter_tensor(part, whole, group=None, async_op=True).wait()
        dist.reduce_scatter_tensor(output=part, input=whole)
        assert_equal(part, torch.full((2,), 5.0))
        assert torch_comm.all_gather_single == link.all_gather, "fsdp_flat's own"
    assert not dist.is_initialized()
    assert torch_comm.all_gather_single is before


# -- the tables ------------------------------------------------------------------------------------------------------


def figures(step: float, host: float = 0.5, peak: int = 1_000_000) -> dict[str, float]:
    """What is measured of one implementation."""
    memory = {"peak": peak, "reserved": 2 * peak, "held": peak, "drift": 0}
    return {"step": step, "least": step / 2, "host": host, **memory, "sent": 1.0, "parameters": 10}


def test_figures_are_compared_within_a_round_with_the_best_of_torchs() -> None:
    rounds = [
        {
            "fsdp1-orig": figures(4 * scale, 0.6),
            "fsdp2": figures(5 * scale, 0.5),
            "flat-orig": figures(2 * scale, 0.1, 3_000_000),
            "flat-fully-shard": figures(4 * scale),
        }
        for scale in (1.0, 100.0, 2.0)
    ]
    lines = gpu.gpu_table({"rounds": rounds}).splitlines()
    wrapper, ours = (next(line for line in lines if f"| {IMPLEMENTATIONS[name].title} |" in line) for name in PEERS_OF)
    assert "| 4000.0 | 1000.0 | 0.50 | 100.0 | 0.20 | 3 | 3.00 | 6 | 3.0 |" in wrapper
    assert "| 8000.0 | 2000.0 | 0.80 |" in ours, "fully_shard is compared with torch's fully_shard alone"
    assert set(peers_of("flat-fully-shard", IMPLEMENTATIONS)) == {"fsdp2", "fsdp2-prefetch"}


PEERS_OF = ("flat-orig", "flat-fully-shard")
