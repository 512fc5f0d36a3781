"""Reads what units did, and when, from a trace of torch.profiler, by the labels that a step puts into it."""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

_LABEL = re.compile(r"FSDP::(\w+) \((.*)\)")
# Kernels and threads of the backends that communicate between accelerators.
_COLLECTIVE = re.compile(r"nccl|rccl|xccl|hccl|oneccl", re.IGNORECASE)
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime")


class Work(Enum):
    """Enumerates what a rank does in a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALL_GATHER = "all-gathers"
    WAIT = "waits for all-gathers"
    REDUCE = "reduce-scatters"
    FINISH = "waits for reduce-scatters"
    HOOKS = "hooks of units"
    OPTIMIZER = "optimizer"
    OTHER = "outside of units"

    @property
    def communicates(self) -> bool:
        """True for communication, and for waiting for it."""
        return self in (Work.ALL_GATHER, Work.WAIT, Work.REDUCE, Work.FINISH)


_WORK_OF_LABEL = {
    "all_gather": Work.ALL_GATHER,
    "all_gather_wait": Work.WAIT,
    "reduce_scatter": Work.REDUCE,
    "post_backward": Work.FINISH,
    "root_post_backward": Work.FINISH,
    "pre_forward": Work.HOOKS,
    "post_forward": Work.HOOKS,
    "pre_backward": Work.HOOKS,
}
# By the label that ends it: what a unit does since the end of another label.
_BETWEEN = {"post_forward": ("pre_forward", Work.FORWARD), "post_backward": ("pre_backward", Work.BACKWARD)}


class Segment(NamedTuple):
    """Describes a time in which a rank did one thing; ``unit`` is empty outside of units. Times are in seconds."""

    start: float
    stop: float
    work: Work
    unit: str

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Holds what a rank did, in seconds since the begin of the trace.

    Attributes:
        segments: what the device of compute did. On the CPU they follow each other without overlap; on an accelerator
            those of communication run beside those of compute.
        flights: for each all-gather the time from its begin until it was complete.
        allocated: after each allocation and release the bytes that are allocated. On the CPU these are those that were
            allocated since the begin, since memory from before is not known. The host of an accelerator allocates
            when it issues work, which may run much later: times are those at which the stream of compute reaches this
            work.
        seconds: length of the trace.
        num_backwards: backwards of the outermost unit.
        is_accelerator: the segments are those of an accelerator.
        began_us: the begin on the profiler's clock, in microseconds.
    """

    segments: tuple[Segment, ...]
    flights: tuple[Segment, ...]
    allocated: tuple[tuple[float, int], ...]
    seconds: float
    num_backwards: int
    is_accelerator: bool
    began_us: float

    @property
    def units(self) -> list[str]:
        """Names of units, in the order of their first work."""
        return list(dict.fromkeys(segment.unit for segment in self.segments if segment.unit))

    def seconds_of(self, *works: Work, unit: str | None = None) -> float:
        """Return the sum of the lengths of segments of ``works``, of one unit or of all."""
        wanted = [each for each in self.segments if each.work in works and unit in (None, each.unit)]
        return sum(segment.seconds for segment in wanted)

    def exposed(self) -> list[Segment]:
        """Return the times in which a rank communicates, or waits for it, and does not compute."""
        by_time = innermost(self.segments, lambda segment: (segment.work.communicates, -segment.start))
        return [segment for segment in by_time if segment.work.communicates]


def read_trace(events: Sequence[dict[str, Any]]) -> StepTrace:
    """Read the events of a Chrome trace, whose times are in microseconds."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    begin = min((event["ts"] for event in timed), default=0.0)
    end = max((event["ts"] + event.get("dur", 0.0) for event in timed), default=0.0)

    def seconds(microseconds: float) -> float:
        return (microseconds - begin) / 1e6

    labels = [event for event in timed if event.get("cat") == "user_annotation"]
    labels.sort(key=lambda event: event["ts"])
    spans = [Segment(0.0, seconds(end), Work.OTHER, "")]
    flights: list[Segment] = []
    ended: dict[tuple[str, str], float] = {}  # by label and unit, when the last one ended
    gathering: dict[str, float] = {}
    num_backwards = 0
    for event in labels:
        start, stop = seconds(event["ts"]), seconds(event["ts"] + event["dur"])
        labelled = _LABEL.fullmatch(event["name"])
        if labelled is None or labelled[1] not in _WORK_OF_LABEL:
            if event["name"].startswith("Optimizer.step"):
                spans.append(Segment(start, stop, Work.OPTIMIZER, ""))
            continue
        label, unit = labelled.groups()
        spans.append(Segment(start, stop, _WORK_OF_LABEL[label], unit))
        num_backwards += label == "root_post_backward"
        before, work = _BETWEEN.get(label, ("", Work.OTHER))
        if (before, unit) in ended:
            spans.append(Segment(ended.pop((before, unit)), start, work, unit))
        ended[label, unit] = stop
        if label == "all_gather":
            gathering[unit] = start
        elif label == "all_gather_wait" and unit in gathering:
            flights.append(Segment(gathering.pop(unit), stop, Work.ALL_GATHER, unit))
    on_host = innermost(spans)
    kernels = _kernels(timed, on_host, seconds)
    memory = [event for event in events if event.get("name") == "[memory]"]
    device_type = max((event["args"]["Device Type"] for event in memory), default=0)
    allocated = [
        (seconds(event["ts"]), event["args"]["Total Allocated"])
        for event in sorted(memory, key=lambda event: event["ts"])
        if event["args"]["Device Type"] == device_type
    ]
    if kernels:
        flights = [moved for flight in flights if (moved := _on_device(flight, kernels)) is not None]
        allocated = _on_device_clock(allocated, kernels)
    return StepTrace(
        tuple(kernel.segment for kernel in kernels) or tuple(on_host),
        tuple(flights),
        tuple(allocated),
        seconds(end),
        num_backwards,
        bool(kernels),
        begin,
    )


def innermost(
    spans: Iterable[Segment], order: Callable[[Segment], Any] = lambda segment: -segment.start
) -> list[Segment]:
    """Return segments without overlap, in order: at each time the first by ``order``, or the span which began last."""
    ordered = sorted(spans, key=attrgetter("start"))
    times = sorted({time for span in ordered for time in (span.start, span.stop)})
    segments: list[Segment] = []
    running: list[tuple[Any, int, Segment]] = []
    begun = 0
    for start, stop in pairwise(times):
        while begun < len(ordered) and ordered[begun].start <= start:
            heapq.heappush(running, (order(ordered[begun]), -begun, ordered[begun]))
            begun += 1
        while running and running[0][2].stop <= start:
            heapq.heappop(running)
        if not running:
            continue
        last = running[0][2]
        if segments and (segments[-1].stop, segments[-1].work, segments[-1].unit) == (start, last.work, last.unit):
            segments[-1] = segments[-1]._replace(stop=stop)
        else:
            segments.append(Segment(start, stop, last.work, last.unit))
    return segments


class _Kernel(NamedTuple):
    """Describes a kernel or copy of an accelerator; ``launched`` is when the host issued it, None if not known."""

    segment: Segment
    launched: float | None
    stream: Any


def _kernels(timed: Sequence[dict[str, Any]], on_host: Sequence[Segment], seconds: Any) -> list[_Kernel]:
    """Return the work of an accelerator, each kernel as part of what the host was doing when it launched it."""
    launched = {
        event["args"]["correlation"]: seconds(event["ts"])
        for event in timed
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = [segment.start for segment in on_host]
    kernels = []
    for event in timed:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        args = event.get("args", {})
        at = launched.get(args.get("correlation"))
        by = on_host[max(0, bisect_right(starts, at) - 1)] if at is not None else Segment(0, 0, Work.OTHER, "")
        work = by.work
        if work in (Work.FORWARD, Work.BACKWARD, Work.OTHER) and _COLLECTIVE.search(event["name"]):
            work = Work.ALL_GATHER if work is Work.FORWARD else Work.REDUCE
        segment = Segment(seconds(event["ts"]), seconds(event["ts"] + event["dur"]), work, by.unit)
        kernels.append(_Kernel(segment, at, (args.get("device"), args.get("stream"))))
    return sorted(kernels, key=lambda kernel: kernel.segment.start)


def _on_device(flight: Segment, kernels: Iterable[_Kernel]) -> Segment | None:
    """Return when an accelerator did what the host issued for an all-gather during ``flight``; None for nothing."""
    of_it = [
        segment
        for segment, launched, _ in kernels
        if launched is not None
        and flight.start <= launched <= flight.stop
        and segment.unit == flight.unit
        and segment.work in (Work.ALL_GATHER, Work.WAIT)
    ]
    if not of_it:
        return None
    return flight._replace(start=of_it[0].start, stop=max(segment.stop for segment in of_it))


def _on_device_clock(allocated: list[tuple[float, int]], kernels: Iterable[_Kernel]) -> list[tuple[float, int]]:
    """Return bytes allocated with the times at which the stream of compute reaches what the host issued then.

    The stream of compute is the one that is busy longest without communicating. Its kernels run in the order of their
    launches, so memory that the host takes or releases at a time belongs to the kernel which it launches next.
    """
    by_stream: defaultdict[Any, list[_Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.launched is not None and not kernel.segment.work.communicates:
            by_stream[kernel.stream].append(kernel)
    if not by_stream:
        return allocated
    computing = max(by_stream.values(), key=lambda kernels: sum(kernel.segment.seconds for kernel in kernels))
    computing.sort(key=lambda kernel: kernel.launched or 0.0)
    launches = [kernel.launched or 0.0 for kernel in computing]
    starts = list(accumulate((kernel.segment.start for kernel in computing), max))
    starts.append(max(kernel.segment.stop for kernel in computing))
    # A device that waits for the host starts a kernel after the host took its memory, never before.
    return [(max(time, starts[bisect_left(launches, time)]), nbytes) for time, nbytes in allocated]
