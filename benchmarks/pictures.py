"""Draws a step table as bars: the picture has the table's own numbers, and carries them in its file."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

PHASES = {"forward": "#4878a8", "backward": "#88b0d0", "optimizer": "#d0a060"}
MEMORY = {
    "MB RSS": ("#b0b0b0", "all of the process (resident)"),
    "MB counted": ("#4878a8", "parameters, gradients and their buffers"),
}
LABEL = "Table"


def rows_of(table: str) -> list[dict[str, str]]:
    """Return the rows of a Markdown table, each by the names in its header."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row)) for row in rows]


def digest_of(table: str) -> str:
    """Return a digest of the numbers that :func:`draw` draws from a table."""
    drawn = [[row.get(key, "") for key in ("implementation", "step ms", *PHASES, *MEMORY)] for row in rows_of(table)]
    return hashlib.sha256(repr(drawn).encode()).hexdigest()


def draw(table: str, path: Path, *, title: str, note: str) -> None:
    """Draw the time of a step by phase, and peak memory, as bars into a PNG.

    Args:
        table: a Markdown table, as :func:`benchmarks.tables.step_table` makes it.
        path: the file.
        title: the line at the top.
        note: what was trained and on which machine, below the title.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows = rows_of(table)[::-1]
    places = range(len(rows))
    height = 0.5 * len(rows) + 2.8
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, height), sharey=True, width_ratios=(3, 2))
    start = [0.0] * len(rows)
    for phase, colour in PHASES.items():
        widths = [float(row[phase]) for row in rows]
        left.barh(places, widths, left=start, color=colour, label=phase, height=0.65)
        start = [a + b for a, b in zip(start, widths)]
    for place, (end, row) in enumerate(zip(start, rows)):
        left.text(end, place, f" {float(row['step ms']):,.0f} ms", va="center", fontsize=9)
    left.set_yticks(places, [row["implementation"] for row in rows], fontsize=9)
    for label in left.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("fsdp_flat") else "normal")
    left.set_xlabel("time of a step, ms: its median, and those of its phases")
    for offset, (key, (colour, text)) in zip((0.18, -0.18), MEMORY.items()):
        values = [float(row.get(key) or 0) for row in rows]
        right.barh([place + offset for place in places], values, color=colour, label=text, height=0.32)
        for place, value in enumerate(values):
            if value:
                right.text(value, place + offset, f" {value:,.0f} MB", va="center", fontsize=8)
    right.set_xlabel("peak memory of a rank, MB")
    right.tick_params(left=False)
    for axes, columns in ((left, len(PHASES)), (right, 1)):
        axes.set_xlim(right=1.2 * axes.dataLim.x1)
        axes.spines[["top", "right"]].set_visible(False)
        # Below the axis, where it hides no bar.
        handles, labels = axes.get_legend_handles_labels()
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.5 / (height - 2.3)), "borderpad": 0}
        axes.legend(handles, labels, frameon=False, fontsize=9, ncols=columns, **place)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, y=1 - 0.12 / height, va="top", ha="left")
    figure.text(0.01, 1 - 0.45 / height, note, fontsize=9, va="top")
    figure.subplots_adjust(left=0.32, right=0.98, wspace=0.06, top=1 - 1.25 / height, bottom=1.05 / height)
    figure.savefig(path, dpi=110, metadata={LABEL: digest_of(table)})
    plt.close(figure)


def digest_in(path: Path) -> str | None:
    """Return the digest of the table that a PNG was drawn from; None if it has none."""
    for kind, data in _chunks(path.read_bytes()):
        key, _, value = data.partition(b"\0")
        if kind == b"tEXt" and key.decode("latin-1") == LABEL:
            return value.decode("latin-1")
    return None


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    # PNG, section 5.3: length of the data, type, data, CRC.
    start = 8
    while start < len(png):
        (length,) = struct.unpack_from(">I", png, start)
        yield png[start + 4 : start + 8], png[start + 8 : start + 8 + length]
        start += length + 12
