"""Compares what the programs do in this checkout and at another revision: ``python -m tests.trace --against REVISION``.

Both run on this machine, with the programs of this checkout, since weights depend on the processor's kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIELDS = ("failed", "weights", "events", "collectives", "sent", "peak", "model", "optimizer", "loaded", "files")

# Two runs of one checkout differ by as much: a reduction may be complete earlier or later.
_PEAK_NOISE = 0.05


def recorded(checkout: Path, out: Path, part: str) -> dict[str, list[dict[str, Any]]]:
    """Run programs with the library of a checkout; return the records of all ranks by program."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(checkout), str(ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "trace" / "record.py"), str(out), part]
    subprocess.run(command, env=environment, cwd=out.parent, check=True)
    records: dict[str, list[dict[str, Any]]] = json.loads(out.read_text())
    return records


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each program and field that differs, with the first difference."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: only {'before' if name in before else 'after'}"
            continue
        for field in FIELDS:
            for rank, (one, other) in enumerate(zip(before[name], after[name], strict=True)):
                old, new = one.get(field), other.get(field)
                if field == "peak" and old and new and abs(new / old - 1) < _PEAK_NOISE:
                    continue
                if old != new:
                    yield f"{name}: {field} on rank {rank}: {_first(old, new)}"
                    break


def _first(old: Any, new: Any) -> str:
    if not isinstance(old, list) or not isinstance(new, list):
        return f"{old} -> {new}"
    at = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new)))
    return f"{len(old)} -> {len(new)}, first at {at}: {old[at : at + 1]} -> {new[at : at + 1]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run both checkouts, print the differences, and return 1 if there are any or a program failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.trace", description=main.__doc__)
    parser.add_argument("--against", default="HEAD", help="revision to compare with; HEAD compares uncommitted changes")
    parser.add_argument("--only", default="", help="programs with this text in their name; all by default")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--detach", str(other), args.against], cwd=ROOT, check=True)
        try:
            before = recorded(other, Path(folder) / "before.json", args.only)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
        after = recorded(ROOT, Path(folder) / "after.json", args.only)
    lines = list(differences(before, after))
    lines += [f"{name}: failed: {records[0]['failed']}" for name, records in after.items() if "failed" in records[0]]
    print(*lines, f"{len(after)} programs, {len(lines)} differences or failures", sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
