"""Records what a rank does in steps of training, by torch.profiler: ``fsdp_flat.record``."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_flat.comm.torch_comm import profiler_is_on
from fsdp_flat.errors import UsageError, counted
from fsdp_flat.extras.describe import ModelDescription, aligned, describe
from fsdp_flat.sizes import size_text
from fsdp_flat.tools.step_trace import StepTrace, Work, read_trace

_COLUMNS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.ALL_GATHER: "all-gather",
    Work.WAIT: "its wait",
    Work.REDUCE: "reduce-scatter",
    Work.FINISH: "its wait",
}
_MOST_LISTED = 10
# Shares of the time from which a summary gives advice.
_MUCH_EXPOSED = 0.05
_MUCH_WAITING = 0.5
# A unit is small if its bytes are this share of the largest unit's.
_SMALL = 0.02


class Recording:
    """Holds what this rank did inside a block of :func:`fsdp_flat.record`, once the block has ended.

    Attributes:
        units: the units of the model, as ``describe`` gives them.
    """

    def __init__(self, units: ModelDescription) -> None:
        self.units = units
        self._events: dict[str, Any] | None = None
        self._trace: StepTrace | None = None

    def end(self, events: dict[str, Any]) -> None:
        """Take the Chrome trace of the block."""
        self._events, self._trace = events, read_trace(events["traceEvents"])

    @property
    def trace(self) -> StepTrace:
        """The work of this rank over time; raises a UsageError before the block has ended."""
        if self._trace is None:
            raise UsageError("The recording has not ended: use it after the block of fsdp_flat.record.")
        return self._trace

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return self.trace.seconds

    @property
    def exposed_seconds(self) -> float:
        """Time in which this rank communicated, or waited for it, and did not compute."""
        return sum(segment.seconds for segment in self.trace.exposed())

    @property
    def peak_allocated(self) -> int:
        """The most bytes that were allocated at a time; on the CPU without those from before the recording."""
        return max((nbytes for _, nbytes in self.trace.allocated), default=0)

    def summary(self) -> str:
        """Return the time by kind of work, the slowest units, and what to change, as text."""
        trace = self.trace
        times = [(work, trace.seconds_of(work)) for work in Work]
        lines = [
            f"{counted(trace.num_backwards, 'backwards')} in {_ms(trace.seconds)} on "
            f"{'an accelerator' if trace.is_accelerator else 'the CPU'}",
            ", ".join(f"{work.value} {_ms(time)}" for work, time in times if time),
            f"compute waited for communication: {_ms(self.exposed_seconds)}, {self._share(self.exposed_seconds)}",
            f"most bytes allocated{'' if trace.is_accelerator else ' since the begin'}: "
            f"{size_text(self.peak_allocated)}",
            "",
            *self._unit_lines(),
            "",
            *self._advice(),
        ]
        return "\n".join(lines)

    def _share(self, seconds: float) -> str:
        return f"{seconds / self.seconds:.0%} of the time" if self.seconds else "0% of the time"

    def _unit_lines(self) -> list[str]:
        trace = self.trace
        rows = [("unit, times in ms", *_COLUMNS.values(), "all")]
        names = sorted(trace.units, key=lambda unit: -trace.seconds_of(*Work, unit=unit))
        for unit in names[:_MOST_LISTED]:
            times = [trace.seconds_of(work, unit=unit) for work in _COLUMNS]
            rows.append((unit, *[f"{1e3 * time:.2f}" for time in (*times, trace.seconds_of(*Work, unit=unit))]))
        left = len(names) - _MOST_LISTED
        return [*aligned(rows, left=range(1)), *([f"and {left} faster units"] if left > 0 else [])]

    def _advice(self) -> list[str]:
        """Return what to change, with the numbers that say so."""
        trace, units = self.trace, self.units.units
        if self.exposed_seconds < _MUCH_EXPOSED * self.seconds:
            return ["Nothing to change about communication: compute hides it."]
        found = []
        waiting = trace.seconds_of(Work.WAIT, Work.FINISH)
        if waiting > _MUCH_WAITING * self.exposed_seconds and not trace.is_accelerator:
            found.append(
                f"{_ms(waiting)} are waits for other ranks, which may be slower: compare their recordings, and balance "
                "their batches."
            )
        num_gathered = Counter(flight.unit for flight in trace.flights)
        again = [unit for unit in units[1:] if num_gathered[unit.name] > trace.num_backwards > 0]
        if again:
            nbytes = sum(unit.gathered_nbytes for unit in units) - self.units.most_gathered_nbytes
            found.append(
                f"{counted(len(again), 'units')} all-gathered twice a step. SHARD_GRAD_OP "
                f"(reshard_after_forward=False) does it once, for up to {size_text(nbytes)} more a rank."
            )
        wide = sum(unit.gathered_nbytes for unit in units if unit.dtypes == ("float32",))
        if wide:
            found.append(
                f"{size_text(wide)} are all-gathered in float32. MixedPrecision(param_dtype=torch.bfloat16) halves "
                "them."
            )
        largest = max((unit.gathered_nbytes for unit in units), default=0)
        small = [unit for unit in units if 0 < unit.gathered_nbytes < _SMALL * largest]
        if len(small) > 1:
            found.append(
                f"{counted(len(small), 'units')} with less than {_SMALL:.0%} of the bytes of the largest, as "
                f"{small[0].name!r}. "
                "Wrap larger modules: each unit costs two all-gathers and a reduce-scatter."
            )
        if len(units) == 1 and largest:
            found.append("The model is one unit, so nothing overlaps. Wrap its blocks (auto_wrap_policy).")
        if trace.is_accelerator and len(units) > 1:
            found.append("forward_prefetch=True begins the all-gather of the next unit while a unit computes forward.")
        found.append("A larger batch of a rank gives compute more work that communication can hide behind.")
        return ["To change:", *[f"- {line}" for line in found]]

    def save(self, path: str | Path) -> None:
        """Write the recording: a ``.json`` for Perfetto or chrome://tracing, or else a picture.

        The JSON has the profiler's events, and besides a track for each unit and one for the bytes allocated.

        Raises:
            OptionError: the suffix is no picture's, or matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self._with_tracks()))
            return
        from fsdp_flat.tools.pictures import draw_recording

        exposed = f"compute waits for communication {self._share(self.exposed_seconds)}"
        draw_recording(self.trace, path, title=f"{self.units.units[0].name}: {_ms(self.seconds)}; {exposed}")

    def _with_tracks(self) -> dict[str, Any]:
        """Return the Chrome trace with a process of one thread for each unit."""
        trace, events = self.trace, self._events
        assert events is not None
        pid = "units of fsdp_flat"
        numbers = {unit: index for index, unit in enumerate(["", *trace.units])}
        added: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": pid}}]
        added += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": unit or "outside of units"}}
            for unit, number in numbers.items()
        ]
        for segment in trace.segments:
            added.append(
                {
                    "ph": "X",
                    "cat": "unit",
                    "name": segment.work.value,
                    "pid": pid,
                    "tid": numbers[segment.unit],
                    "ts": trace.began_us + 1e6 * segment.start,
                    "dur": 1e6 * segment.seconds,
                }
            )
        for time, nbytes in trace.allocated:
            counter = {"ph": "C", "name": "bytes allocated", "pid": pid, "ts": trace.began_us + 1e6 * time}
            added.append({**counter, "args": {"bytes": nbytes}})
        return {**events, "traceEvents": [*events["traceEvents"], *added]}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


@contextmanager
def record(model: nn.Module) -> Generator[Recording, None, None]:
    """Record what this rank does inside the block, one or more steps, and the units of ``model`` in them::

        with fsdp_flat.record(model) as r:
            train_step(model, batch)
        print(r.summary())
        r.save("step.png")
        r.save("step.json")

    It runs torch.profiler, which makes the steps inside the block slower; outside of it nothing is recorded, and
    nothing costs anything. Nothing is communicated: each rank, or one alone, records itself. Record a step after the
    first, which sets up memory and connections. If the block raises, nothing is recorded.

    Args:
        model: a module with units, of ``FullyShardedDataParallel`` or ``fully_shard``.

    Raises:
        OptionError: (a ValueError) nothing at or below ``model`` is wrapped.
        UsageError: (a RuntimeError) a profiler is running already.
    """
    recording = Recording(describe(model))
    if profiler_is_on():
        raise UsageError("A profiler is running already, so fsdp_flat.record cannot start another. End it first.")
    activities = [ProfilerActivity.CPU]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        activities += [
            each for each in (ProfilerActivity.CUDA, ProfilerActivity.XPU) if each.name == accelerator.type.upper()
        ]
    with profile(activities=activities, profile_memory=True) as profiler:
        yield recording
        if accelerator is not None:
            torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        recording.end(json.loads(path.read_text()))
