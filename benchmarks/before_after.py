"""Compares two checkouts, preset by preset: ``python -m benchmarks.before_after --against CHECKOUT``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import main as bench
from benchmarks.runner import ROOT
from benchmarks.spec import BEFORE, IMPLEMENTATIONS
from benchmarks.tables import machine, markdown

PRESETS = ("communication", "compute", "tiny")
OURS = ("flat-full-flat", "flat-full-orig", "flat-grad-op")
NOTE = """\
`python -m benchmarks.before_after --against CHECKOUT` runs both checkouts in the same rounds. "step" is the median over
rounds of the ratio within a round, after to before, with the smallest and the largest; "CPU" is the ratio of the
minimum CPU times of a step over all rounds, which varies less.
"""


def comparison_table(results: Path) -> str:
    """Return the table of all presets in the folder ``results``; empty if there is none."""
    rows, where, commits = [], "", ""
    for preset in PRESETS:
        path = results / f"before-{preset}.json"
        if not path.exists():
            continue
        found: dict[str, Any] = json.loads(path.read_text())
        where, commits = machine(found), found.get("commits", "")
        for name in OURS:
            steps = [row[name]["step"] / row[BEFORE + name]["step"] for row in found["rounds"]]
            cpu = [min(row[each]["cpu"] for row in found["rounds"]) for each in (name, BEFORE + name)]
            spread = f"{min(steps):.2f} to {max(steps):.2f}"
            row = [IMPLEMENTATIONS[name], preset, f"{statistics.median(steps):.2f}", spread, f"{cpu[0] / cpu[1]:.2f}"]
            rows.append(row)
    if not rows:
        return ""
    table = markdown(["implementation", "preset", "step", "from, to", "CPU"], rows)
    return f"{commits}{where}\n{table}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every preset in both checkouts and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after", description=main.__doc__)
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of fresh processes")
    parser.add_argument("--label", default="", help="which versions were compared, for the page")
    args = parser.parse_args(argv)
    results = ROOT / "benchmarks" / "results"
    for preset in PRESETS:
        flags = ["--preset", preset, "--rounds", str(args.rounds), "--against", str(args.against), "--only", *OURS]
        bench([*flags, "--out", str(results), "--name", f"before-{preset}"])
        path = results / f"before-{preset}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "commits": args.label and f"{args.label}. "}))
    print(comparison_table(results))


if __name__ == "__main__":
    main()
