"""The benchmark for one GPU: its rows run on the CPU at sizes where nothing means anything, and its parts are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu
from benchmarks.decoder import Decoder
from benchmarks.gpu_rows import IMPLEMENTATIONS, PEERS, ROWS, shard
from benchmarks.idle import CAUSES, idle_by_cause
from benchmarks.link import LABEL, HostStreams, Link, pretended
from fsdp_flat.comm import torch_comm
from tests.support import assert_equal

# -- rows, tried out on the CPU --------------------------------------------------------------------------------------

KINDS = ["fsdp1-orig", "fsdp2", "flat-orig", "flat-fully-shard"]


@pytest.mark.parametrize("key", ROWS)
def test_part_7_every_row_trains_torchs_and_our_implementations(key: str) -> None:
    row = ROWS[key].tiny()
    sent = {}
    for name in KINDS:
        found = gpu.measure(name, row, "cpu", 4)
        assert found["step"] > 0
        assert found["parameters"] > 10_000
        sent[name] = found["sent"]
        assert set(CAUSES) <= set(found)
    # torch's FSDP1 has another all-gather on CPUs. Ours sends less than FSDP2: it keeps the last units until backward.
    assert 0 < sent["flat-orig"] <= sent["flat-fully-shard"] <= sent["fsdp2"], sent


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name not in KINDS])
def test_part_7_every_implementation_trains_behind_a_link(name: str) -> None:
    found = gpu.measure(name, ROWS["1.2B-60"].tiny(), "cpu", 4)
    assert found["step"] > 0
    assert (found["sent"] > 0) == (name != "local")


def test_explicit_prefetch_is_of_two_units_each_way() -> None:
    calls: list[tuple[int, str, list[int]]] = []
    row = ROWS["1.2B-60"].tiny()
    with pretended(4), pytest.MonkeyPatch.context() as patch:
        import fsdp_flat

        units = Decoder(row.model)
        number = {id(block): index for index, block in enumerate(units.blocks)}
        for way in ("forward", "backward"):

            def noted(unit: Any, modules: list[Any], way: str = way) -> None:
                calls.append((number.get(id(unit), -1), way, [number[id(module)] for module in modules]))

            patch.setattr(fsdp_flat.FSDPModule, f"set_modules_to_{way}_prefetch", noted)
        shard("flat-fully-shard-prefetch", units, row, torch.device("cpu"))
    assert calls == [
        (0, "forward", [1, 2]),
        (0, "backward", []),
        (1, "forward", [2]),
        (1, "backward", [0]),
        (2, "forward", []),
        (2, "backward", [1, 0]),
        (-1, "forward", [0, 1]),
        (-1, "backward", [2, 1]),
    ]


@pytest.mark.parametrize(
    "key, billions, gbps",
    [
        ("0.24B", 0.24, None),
        ("1.2B", 1.2, None),
        ("1.2B-150", 1.2, 150),
        ("1.2B-60", 1.2, 60),
        ("1.2B-60-grad-op", 1.2, 60),
        ("8B-350", 8.0, 350),
        ("0.67B-compiled", 0.67, None),
        ("0.54B-offload", 0.54, None),
    ],
)
def test_rows_have_the_sizes_and_links_of_their_names(key: str, billions: float, gbps: float | None) -> None:
    assert list(ROWS) == [name for name in ROWS if name.startswith(("0", "1", "8"))]
    row = ROWS[key]
    with torch.device("meta"):
        model = Decoder(row.model)
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(billions * 1e9, rel=0.025)
    assert row.gbps == gbps


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
    assert "**1.2B, 7 GB/s**" in text
    assert f"| {IMPLEMENTATIONS['flat-orig'].title} |" in text
    assert text in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize("gbps", ["0", "-1"])
def test_a_link_has_a_bandwidth(gbps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--gbps", gbps])
    assert "--gbps is a bandwidth above 0" in capsys.readouterr().err


def test_an_implementation_that_fails_on_the_device_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: gpu.subprocess.CompletedProcess([], 1, "", "a\nOOM"))
    failed = gpu._in_new_process("fsdp2", "1.2B", ROWS["1.2B"], "cuda", 8)
    assert failed == {"error": "OOM"}
    text = gpu.gpu_table({"rounds": [{"fsdp2": failed, "flat-orig": figures(1.0)}]})
    assert f"{IMPLEMENTATIONS['fsdp2'].title} failed: `OOM`." in text
    assert f"| {IMPLEMENTATIONS['flat-orig'].title} | 1000.0 |" in text


# -- the emulated link -----------------------------------------------------------------------------------------------


def test_part_7_collectives_run_in_order_on_one_stream_each_for_its_bytes() -> None:
    streams = HostStreams()
    # 1 GB/s among 4 ranks: 3/4 of the bytes of the full buffer, 1e-9 s each.
    link = Link(4, 1.0, streams)
    compute, other = streams.current, streams.new()
    full, own = torch.zeros(1000), torch.ones(250)
    seconds = 3000e-9
    compute.spin(1.0)
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


def test_part_7_a_collective_that_is_not_asynchronous_makes_the_current_stream_wait() -> None:
    streams = HostStreams()
    link = Link(2, 1.0, streams)
    assert link.all_gather(torch.zeros(1000), torch.ones(500)) is None
    assert streams.current.seconds == pytest.approx(2000e-9)


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


# -- idle time by cause ----------------------------------------------------------------------------------------------


def span(category: str, name: str, start: float, stop: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "args": args}


def launched(number: int, at: float, start: float, stop: float, stream: int) -> list[dict[str, Any]]:
    """A kernel, and its launch by the host."""
    return [
        span("cuda_runtime", "cudaLaunchKernel", at, at + 1, correlation=number),
        span("kernel", "kernel", start, stop, correlation=number, stream=stream),
    ]


def test_part_7_idle_time_is_the_hosts_until_the_launch_then_the_links_while_it_is_busy() -> None:
    events = [
        span("user_annotation", LABEL, 10, 20),
        # Two kernels of a collective: 120 to 180, and 180 to 260.
        *launched(1, 12, 120, 180, stream=20),
        *launched(2, 15, 180, 260, stream=20),
        *launched(3, 5, 0, 100, stream=7),
        # Issued in time, waits for the link, and 30 more for a copy out of the gathered buffer.
        *launched(4, 30, 290, 400, stream=7),
        *launched(5, 32, 262, 288, stream=21),
        # Issued late: 60 after the stream ran dry, then starts after 5.
        *launched(6, 460, 465, 500, stream=7),
        *launched(7, 462, 500, 600, stream=7),
    ]
    found = idle_by_cause(events, 2)
    expected = {"busy": 345, "idle_host": 60, "idle_link": 140, "idle_other": 20 + 30 + 5}
    assert {key: round(2e6 * value) for key, value in found.items()} == expected


def test_part_7_a_trace_without_kernels_has_no_idle_time() -> None:
    assert idle_by_cause([span("cpu_op", "add", 0, 5)], 2) == dict.fromkeys(("busy", *CAUSES), 0.0)


# -- the tables ------------------------------------------------------------------------------------------------------


def figures(step: float, host: float = 0.5, peak: int = 1_000_000) -> dict[str, float]:
    """What is measured of one implementation."""
    idle = {"busy": step / 2, "idle_link": step / 4, "idle_host": step / 8, "idle_other": step / 8}
    memory = {"peak": peak, "reserved": 2 * peak, "held": peak, "drift": 0}
    return {"step": step, "least": step / 2, "host": host, **idle, **memory, "sent": 1.0, "parameters": 10}


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
    assert "| 4000.0 | 1000.0 | 0.50 | 100.0 | 0.20 | 2000.0 | 1000.0 | 500.0 | 500.0 | 3 | 3.00 | 6 | 3.0 |" in wrapper
    assert "| 8000.0 | 2000.0 | 0.80 |" in ours, "fully_shard is compared with torch's fully_shard alone"
    assert set(PEERS["flat-fully-shard"]) == {"fsdp2", "fsdp2-prefetch"}


PEERS_OF = ("flat-orig", "flat-fully-shard")


def test_part_7_the_tables_name_the_device_the_command_and_the_method() -> None:
    row = {"title": "1.2B", "gbps": 60.0, "rounds": [{"fsdp2": figures(2.0), "flat-orig": figures(1.0)}]}
    machine = {"python": "3.12", "torch": "2.11.0+cu130", "date": "2026-11-27"}
    results = {
        "rows": {"1.2B-60": row},
        "world": 8,
        "num_rounds": 1,
        "device": "NVIDIA H200",
        "driver": "580",
        "command": "python -m benchmarks.gpu",
        "where": machine,
    }
    line = next(line for line in gpu.gpu_page(results).splitlines() if "NVIDIA H200" in line)
    for part in ("torch 2.11.0+cu130", "`python -m benchmarks.gpu`", "communication emulated"):
        assert part in line
