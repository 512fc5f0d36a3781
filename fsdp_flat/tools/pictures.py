"""Draws the bytes of a step over time, and what a rank was doing, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fsdp_flat.errors import OptionError
from fsdp_flat.sizes import scale_of, size_text
from fsdp_flat.tools.step_memory import BytesByKind, Moment
from fsdp_flat.tools.step_trace import StepTrace, Work

# From the one that stays longest, at the bottom, to the one that changes most.
_KINDS = {
    "optimizer": "#b8b8b8",
    "parameters": "#787878",
    "gradients": "#d0a060",
    "gathered": "#4878a8",
    "activations": "#88b890",
}
assert set(_KINDS) == {each.name for each in fields(BytesByKind)}


def pyplot() -> Any:
    """Return matplotlib's pyplot, for files; raise an OptionError if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise OptionError("Pictures need matplotlib: pip install matplotlib.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    return plt


def finish(plt: Any, figure: Any, path: Path) -> None:
    """Write a figure and close it; raise an OptionError for a suffix that matplotlib does not know."""
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise OptionError(f"{path} cannot be written as a picture: {error}") from error
    finally:
        plt.close(figure)


def draw_plan(moments: Sequence[Moment], path: Path, *, title: str, limit_nbytes: int | None = None) -> None:
    """Draw the bytes of a planned step by kind, one after another, with the phases, the peak, and the limit if any."""
    plt = pyplot()
    peak = max(range(len(moments)), key=lambda index: moments[index].nbytes.total)
    scale, unit = scale_of(moments[peak].nbytes.total)
    figure, axes = plt.subplots(figsize=(12, 5), layout="constrained")
    # The end of a step has one moment, which would be invisible.
    width = max(1, len(moments) // 40)
    places = [*range(len(moments)), len(moments) - 1 + width]
    shown = [*moments, moments[-1]]
    rows = [[getattr(moment.nbytes, kind) / scale for moment in shown] for kind in _KINDS]
    axes.stackplot(places, rows, labels=list(_KINDS), colors=list(_KINDS.values()), step="post", linewidth=0)
    starts = {moment.phase: index for index, moment in reversed(list(enumerate(moments)))}
    top = moments[peak].nbytes.total / scale
    height = top
    if limit_nbytes is not None:
        limit = limit_nbytes / scale
        label = f"limit {size_text(limit_nbytes)}"
        axes.axhline(limit, color="#b03030", linewidth=1.2, linestyle="--", label=label)
        height = max(top, limit)
    for phase, start in starts.items():
        axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
        at_right = start > 0.9 * places[-1]
        axes.text(start, 1.15 * height, f" {phase.value} ", ha="right" if at_right else "left", fontsize=9)
    axes.plot([peak], [top], marker="v", color="black", markersize=6, clip_on=False)
    _label(axes, title, f"bytes of a rank, {unit}", "operators, all-gathers and reductions of a step, in order")
    axes.set_xlim(0, places[-1])
    axes.set_ylim(0, 1.24 * height)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    finish(plt, figure, path)


def _label(axes: Any, title: str, y_label: str, x_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(y_label)
    axes.set_xlabel(x_label)
    axes.spines[["top", "right"]].set_visible(False)


_WORKS = {
    Work.FORWARD: "#4878a8",
    Work.BACKWARD: "#88b0d0",
    Work.ALL_GATHER: "#c06040",
    Work.WAIT: "#f0b0a0",
    Work.REDUCE: "#8060a0",
    Work.FINISH: "#c8b8d8",
    Work.HOOKS: "#a0a0a0",
    Work.OPTIMIZER: "#d0a060",
    Work.OTHER: "#e4e4e4",
}
_IN_FLIGHT = "#c06040"


def draw_recording(trace: StepTrace, path: Path, *, title: str) -> None:
    """Draw what a rank did over time, by unit, and the bytes allocated, on the same clock if the trace has them so."""
    plt = pyplot()
    rows = ["this rank", *trace.units]
    height = min(16.0, 3.6 + 0.3 * len(rows))
    figure, (timeline, memory) = plt.subplots(
        2,
        1,
        figsize=(13, height),
        sharex=True,
        height_ratios=(height - 2.2, 2.2),
        layout="constrained",
    )
    place_of = {name: place for place, name in enumerate(rows)}
    for work, colour in _WORKS.items():
        segments = [segment for segment in trace.segments if segment.work is work]
        if not segments:
            continue
        for place, some in [
            (0, segments),
            *[(place_of[unit], [each for each in segments if each.unit == unit]) for unit in trace.units],
        ]:
            bars = [(1e3 * segment.start, 1e3 * segment.seconds) for segment in some]
            timeline.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour, label=work.value if place == 0 else None)
    for flight in trace.flights:
        bar = [(1e3 * flight.start, 1e3 * flight.seconds)]
        timeline.broken_barh(bar, (place_of[flight.unit] + 0.28, 0.12), facecolors=_IN_FLIGHT)
    timeline.broken_barh([], (0, 0), facecolors=_IN_FLIGHT, label="all-gather in flight (line)")
    timeline.set_yticks(range(len(rows)), rows, fontsize=9 if len(rows) < 40 else 6)
    timeline.set_ylim(len(rows) - 0.5, -0.5)
    timeline.axhline(0.5, color="black", linewidth=0.8)
    timeline.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    _label(timeline, title, "", "")
    scale, unit = scale_of(max((nbytes for _, nbytes in trace.allocated), default=1))
    times = [0.0, *[1e3 * time for time, _ in trace.allocated], 1e3 * trace.seconds]
    sizes = [nbytes / scale for _, nbytes in trace.allocated] or [0.0]
    memory.fill_between(
        times, [sizes[0] if trace.is_accelerator else 0.0, *sizes, sizes[-1]], step="post", color="#88b890"
    )
    since = "" if trace.is_accelerator else "\nsince the begin"
    clock = "time of the device, ms" if trace.is_accelerator else "time, ms"
    _label(memory, "", f"allocated{since}, {unit}", clock)
    memory.set_xlim(0, 1e3 * trace.seconds)
    memory.set_ylim(bottom=0)
    finish(plt, figure, path)
