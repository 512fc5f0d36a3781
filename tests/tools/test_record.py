"""``record``: what a rank did in a step, by unit, as text, picture and trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_flat import ShardingStrategy, fully_shard, record
from fsdp_flat.comm.torch_comm import profiler_is_on
from fsdp_flat.errors import OptionError, UsageError
from fsdp_flat.extras.describe import describe
from fsdp_flat.tools.recording import Recording
from fsdp_flat.tools.step_trace import Work, read_trace
from tests.support import on_ranks
from tests.support.kit import BLOCKS, batch, square_loss, wrapped
from tests.support.models import Stack

UNITS = ["Stack", "blocks.0", "blocks.1", "blocks.2"]


def made(front: str, **kwargs: Any) -> nn.Module:
    model = Stack()
    if front == "wrapper":
        return wrapped(model, auto_wrap_policy=BLOCKS, **kwargs)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    square_loss(model, batch(rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(model: nn.Module, num_steps: int, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        step(model, optimizer, rank)


@on_ranks(2, 4)
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_a_recording_has_the_work_of_each_unit_in_each_step(front: str, rank: int) -> None:
    model = made(front)
    steps(model, 2, rank)
    with record(model) as recording:
        steps(model, 2, rank)
    trace = recording.trace
    assert sorted(name.replace("FSDPStack", "Stack") for name in trace.units) == UNITS
    assert trace.num_backwards == 2
    for unit in trace.units:
        for work in (Work.FORWARD, Work.BACKWARD, Work.ALL_GATHER, Work.REDUCE):
            assert trace.seconds_of(work, unit=unit) > 0, (unit, work)
    assert trace.seconds_of(Work.OPTIMIZER) > 0
    # On the CPU the segments follow each other, from the first event to the last.
    assert all(before.stop <= after.start for before, after in zip(trace.segments, trace.segments[1:], strict=False))
    assert sum(segment.seconds for segment in trace.segments) == pytest.approx(recording.seconds)
    communicating = trace.seconds_of(*[work for work in Work if work.communicates])
    assert recording.exposed_seconds == pytest.approx(communicating)
    # Each unit but the outermost, which stays unsharded, and the last one, which is parked, is gathered twice a step.
    assert len(trace.flights) == 2 * (2 * len(UNITS) - 2)
    assert recording.peak_allocated > 0


@on_ranks(2)
def test_nothing_is_left_behind_by_a_recording(rank: int) -> None:
    model = made("wrapper")
    before = {key for module in model.modules() for key in (*module._forward_hooks, *module._forward_pre_hooks)}
    with record(model):
        assert profiler_is_on()
        steps(model, 1, rank)
    assert not profiler_is_on()
    assert before == {key for module in model.modules() for key in (*module._forward_hooks, *module._forward_pre_hooks)}
    with pytest.raises(ZeroDivisionError), record(model) as recording:
        _ = 1 / 0
    assert not profiler_is_on()
    with pytest.raises(UsageError, match="has not ended"):
        recording.summary()


@on_ranks(2)
def test_a_recording_is_saved_as_a_picture_and_for_perfetto(rank: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need it")
    model = made("wrapper")
    steps(model, 1, rank)
    with record(model) as recording:
        steps(model, 1, rank)
        with pytest.raises(UsageError, match="has not ended"):
            recording.save(tmp_path / "early.json")
    recording.save(tmp_path / f"{rank}.png")
    assert (tmp_path / f"{rank}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match="cannot be written as a picture"):
        recording.save(tmp_path / "step.xyz")
    recording.save(str(tmp_path / f"{rank}.json"))
    events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
    own = [event for event in events if event["pid"] == "units of fsdp_flat"]
    own = [event for event in own if event["name"] != "process_name"]
    names = {event["args"]["name"] for event in own if event["ph"] == "M"}
    assert names == {"outside of units", *UNITS}
    labels = [event for event in events if event["name"] == "FSDP::all_gather (blocks.1)"]
    assert len(labels) == 2, "the profiler's own events are there too"
    tracks = {event["tid"]: event["args"]["name"] for event in own if event["ph"] == "M"}
    gathers = [event for event in own if event["ph"] == "X" and event["name"] == "all-gathers"]
    starts = sorted(event["ts"] for event in gathers if tracks[event["tid"]] == "blocks.1")
    assert starts == pytest.approx(sorted(event["ts"] for event in labels), abs=1)
    assert [event["args"]["bytes"] for event in own if event["ph"] == "C"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(OptionError, match=r"pip install matplotlib"):
            recording.save(tmp_path / "none.png")


@on_ranks(2)
def test_a_recording_needs_units_and_no_other_profiler(rank: int) -> None:
    with pytest.raises(OptionError, match="Stack holds no FullyShardedDataParallel"), record(Stack()):
        pass
    model = made("wrapper")
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(UsageError, match="A profiler is running already"),
        record(model),
    ):
        pass


@on_ranks(2)
def test_a_summary_says_where_time_goes_and_what_to_change(rank: int) -> None:
    model = made("wrapper")
    steps(model, 1, rank)
    with record(model) as recording:
        steps(model, 1, rank)
    text = recording.summary()
    lines = text.splitlines()
    assert lines[0].startswith("1 backward in ")
    table = lines.index("") + 1
    assert lines[table].startswith("unit, times in ms")
    assert {line.split()[0] for line in lines[table + 1 : table + 1 + len(UNITS)]} == set(UNITS)
    totals = [float(line.split()[-1]) for line in lines[table + 1 : table + 1 + len(UNITS)]]
    assert totals == sorted(totals, reverse=True), "the slowest unit is first"
    assert "SHARD_GRAD_OP (reshard_after_forward=False)" in text
    assert "param_dtype=torch.bfloat16" in text
    kept = made("wrapper", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    steps(kept, 1, rank)
    with record(kept) as other:
        steps(kept, 1, rank)
    assert "SHARD_GRAD_OP" not in other.summary()


# -- a trace of an accelerator ---------------------------------------------------------------------------------------


def span(category: str, name: str, start: float, stop: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "args": args}


def launch(correlation: int, at: float) -> dict[str, Any]:
    return span("cuda_runtime", "cudaLaunchKernel", at, at + 1, correlation=correlation)


ACCELERATOR = [
    span("user_annotation", "FSDP::pre_forward (root)", 0, 20),
    span("user_annotation", "FSDP::all_gather (root)", 5, 10),
    span("user_annotation", "FSDP::all_gather_wait (root)", 10, 12),
    span("user_annotation", "FSDP::post_forward (root)", 40, 45),
    launch(1, 6),
    launch(2, 22),
    launch(3, 30),
    span("kernel", "ncclDevKernel_AllGather_RING_LL", 10, 110, correlation=1),
    span("kernel", "gemm", 60, 160, correlation=2),
    span("kernel", "gemm", 160, 200, correlation=3),
    span("gpu_user_annotation", "FSDP::all_gather (root)", 10, 110),
    {"ph": "i", "name": "[memory]", "ts": 7, "args": {"Device Type": 0, "Total Allocated": 1}},
    {"ph": "i", "name": "[memory]", "ts": 8, "args": {"Device Type": 1, "Total Allocated": 500}},
    {"ph": "i", "name": "[memory]", "ts": 50, "args": {"Device Type": 1, "Total Allocated": 700}},
]


def test_kernels_of_an_accelerator_belong_to_what_the_host_did_when_it_launched_them() -> None:
    trace = read_trace(ACCELERATOR)
    assert trace.is_accelerator
    works = [(segment.work, segment.unit, round(1e6 * segment.seconds)) for segment in trace.segments]
    assert works == [(Work.ALL_GATHER, "root", 100), (Work.FORWARD, "root", 100), (Work.FORWARD, "root", 40)]
    exposed = [(round(1e6 * each.start), round(1e6 * each.stop)) for each in trace.exposed()]
    assert exposed == [(10, 60)], "the all-gather, until a matrix product runs beside it"
    assert [nbytes for _, nbytes in trace.allocated] == [500, 700], "the accelerator's, not the host's"


def memory(at: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "ts": at, "args": {"Device Type": 1, "Total Allocated": nbytes}}


def kernel(name: str, start: float, stop: float, correlation: int, stream: int) -> dict[str, Any]:
    return span("kernel", name, start, stop, correlation=correlation, stream=stream, device=0)


# The host has issued everything after 50 of 1,000 microseconds; the root computes in two kernels on stream 7.
SLOW_DEVICE = [
    span("user_annotation", "FSDP::pre_forward (root)", 0, 12),
    span("user_annotation", "FSDP::all_gather (root)", 2, 6),
    span("user_annotation", "FSDP::all_gather_wait (root)", 8, 10),
    span("user_annotation", "FSDP::post_forward (root)", 30, 35),
    memory(1, 100),
    launch(1, 3),
    launch(2, 9),
    memory(13, 300),
    launch(3, 15),
    memory(20, 500),
    launch(4, 22),
    memory(40, 200),
    launch(5, 42),
    memory(49, 50),
    kernel("ncclDevKernel_AllGather_RING_LL", 4, 250, 1, stream=20),
    kernel("copy of the gathered parameters", 250, 290, 2, stream=20),
    kernel("gemm", 300, 600, 3, stream=7),
    kernel("gemm", 600, 900, 4, stream=7),
    kernel("add", 900, 1000, 5, stream=7),
]


def recording_of(events: list[dict[str, Any]]) -> Recording:
    recording = Recording(describe(wrapped(Stack(), auto_wrap_policy=BLOCKS)))
    recording.end({"traceEvents": events})
    return recording


def test_memory_of_a_device_is_on_the_devices_clock_where_launches_tell_which_kernel_took_it() -> None:
    trace = read_trace(SLOW_DEVICE)
    assert [(round(1e6 * time), nbytes) for time, nbytes in trace.allocated] == [
        (300, 100),
        (300, 300),
        (600, 500),
        (900, 200),
        (1000, 50),
    ]
    # The all-gather in flight is drawn under bars of the device too.
    assert [(round(1e6 * flight.start), round(1e6 * flight.stop), flight.unit) for flight in trace.flights] == [
        (4, 290, "root")
    ]


def test_memory_that_a_fast_device_waits_for_is_taken_when_the_host_takes_it() -> None:
    events = [launch(1, 10), memory(50, 5), launch(2, 60), kernel("gemm", 12, 20, 1, 7), kernel("gemm", 62, 70, 2, 7)]
    trace = read_trace([*events, memory(90, 1), span("cpu_op", "waits", 0, 100)])
    assert [(round(1e6 * time), nbytes) for time, nbytes in trace.allocated] == [(62, 5), (90, 1)]


@on_ranks(2)
def test_a_saved_recording_of_a_device_names_the_clock_of_its_memory(rank: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need it")
    from matplotlib.figure import Figure

    recording = recording_of(SLOW_DEVICE)
    recording.save(tmp_path / f"{rank}.json")
    events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "C"} == {"bytes allocated"}
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_args, **_kwargs: figures.append(figure))
        recording.save(tmp_path / f"{rank}.png")
    timeline, allocated = figures[0].axes
    assert allocated.get_xlabel() == "time of the device, ms"
    assert timeline.get_shared_x_axes().joined(timeline, allocated)
