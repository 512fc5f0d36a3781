"""Draws mistakes at random and says which the quick suite finds: ``python -m tests.mutations --count 60 --seed 0``.

Each mistake is made in a copy of the project. The tests run that execute the changed line, by a record (``--record``):
those of the quick suite first, then, where they find nothing, the others of the cover. What only these find is what
``make test`` misses. What no test finds is the same program, or a hole.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.executed import ROOT, Record
from tests.mutations.mutants import Mutant, drawn

PACKAGES = "core,runtime,comm,state,checkpoint"


def main(arguments: list[str]) -> int:
    """Draw mutants, run the tests of each, and print a line for each; return 1 if the quick suite misses too many."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--record", action="store_true", help="run the cover once to learn which tests execute what")
    parser.add_argument("--count", type=int, default=60, help="number of mistakes")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of those to make, from 0, to go on with a draw")
    parser.add_argument("--packages", default=PACKAGES, help="packages in which they are made")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a run counts as a failure")
    parser.add_argument("--most", type=int, default=3, help="how many the cover may find that the quick suite misses")
    parser.add_argument("--list", action="store_true", help="only say which mistakes would be made")
    options = parser.parse_args(arguments)
    record = Record()
    if options.record:
        return record.make()
    mutants = drawn(ROOT, [f"fsdp_flat/{each}" for each in options.packages.split(",")], options.count, options.seed)
    missed = 0
    for number, mutant in enumerate(mutants):
        if options.only is None or number in options.only:
            found, test = ("", "") if options.list else found_by(mutant, record, options.limit)
            missed += found == "cover"
            text = mutant.describe((ROOT / mutant.path).read_bytes())
            print(number, found, text, test, sep="\t", flush=True)
    print(f"{missed} are found by the cover alone")
    return int(missed > options.most)


def found_by(mutant: Mutant, record: Record, limit_s: float) -> tuple[str, str]:
    """Return the smallest size of the suite that fails on a mutant, "quick" or "cover", or "none", and a test of it."""
    tests = record.tests(mutant.path, mutant.line)
    with tempfile.TemporaryDirectory(prefix="fsdp_flat_mutant_") as name:
        root = Path(name)
        shutil.copytree(ROOT, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".[a-z]*"))
        (root / mutant.path).write_bytes(mutant.apply((ROOT / mutant.path).read_bytes()))
        (root / "tests.txt").write_text("\n".join(tests))
        files = sorted({test.partition("::")[0] for test in tests})
        for size in ("quick", "cover") if tests else ():
            failure = failure_of(["--size", size, "--listed=tests.txt", "-x", *files], root, limit_s)
            if failure:
                return size, failure
    return "none", f"of {len(tests)}"


def failure_of(arguments: Sequence[str], root: Path, limit_s: float) -> str:
    """Return a test that fails of the suite of a copy of the project, or an empty text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests", *arguments]
    try:
        done = subprocess.run(command, cwd=root, env=environment, timeout=limit_s, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return "no end"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"status {done.returncode}" if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
