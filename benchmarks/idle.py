"""Reads from a trace of torch.profiler how long the stream of compute was idle, and for which cause."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.link import LABEL

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# By cause, the heading of the column.
CAUSES = {"idle_link": "idle, link", "idle_host": "idle, host", "idle_other": "idle, other"}


def idle_by_cause(events: Sequence[dict[str, Any]], num_steps: int) -> dict[str, float]:
    """Return the seconds a step in which the stream of compute was busy, and idle by cause.

    The stream of compute is the one that is busy longest without collectives. While it is idle,

    - ``idle_host`` is the time before the host has issued its next kernel;
    - ``idle_link`` is the rest in which a collective runs, which the next kernel waits for at one remove or another;
    - ``idle_other`` is what is left, such as waits for copies out of gathered buffers, and the latency of launches.

    Args:
        events: those of a Chrome trace, in microseconds.
        num_steps: steps in the trace.

    Returns:
        ``busy`` and the keys of ``CAUSES``; zeros if no kernel was recorded.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    labels = [
        (event["ts"], event["ts"] + event["dur"])
        for event in timed
        if event.get("name") == LABEL and event.get("cat") == "user_annotation"
    ]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in timed
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    labels.sort()
    begins = [start for start, _ in labels]
    link: list[tuple[float, float]] = []
    streams: defaultdict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for event in timed:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        start, stop = event["ts"], event["ts"] + event["dur"]
        at = launched.get(event["args"].get("correlation"), start)
        place = bisect_right(begins, at) - 1
        if place >= 0 and at <= labels[place][1]:
            link.append((start, stop))
        else:
            streams[event["args"].get("stream")].append((start, stop, at))
    found = dict.fromkeys(("busy", *CAUSES), 0.0)
    if not streams:
        return found
    compute = sorted(max(streams.values(), key=lambda work: sum(stop - start for start, stop, _ in work)))
    link = _joined(link)
    found["busy"] = sum(stop - start for start, stop, _ in compute)
    for (_, before, _), (after, _, at) in pairwise(compute):
        if after <= before:
            continue
        issued = min(max(at, before), after)
        found["idle_host"] += issued - before
        on_link = sum(max(0.0, min(stop, after) - max(start, issued)) for start, stop in link)
        found["idle_link"] += on_link
        found["idle_other"] += after - issued - on_link
    return {key: value / 1e6 / num_steps for key, value in found.items()}


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that any of ``spans`` covers, without overlap and in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
