"""Draws mistakes at random and says which the quick suite finds: ``python -m tests.mutations --count 60 --seed 0``.

Each mistake is made in a copy of the project. The quick suite runs the folders of tests that the mistake's package
has; where it finds nothing, the cover runs the same ones. What the cover alone finds is what ``make test`` misses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.mutants import Mutant, drawn

ROOT = Path(__file__).parents[2]
STEP = ("accumulation", "activation_checkpointing", "clipping", "forwards", "gradients", "guards", "loss_scaling")
STEP += ("mixed_precision", "optimizers", "training", "errors")
UNITS = ("wrapping", "strategies", "tensor_parallel", "original_parameters", "frozen_parameters", "full_parameters")
UNITS += ("meta_device", "changed_weights")
STATE = ("state_dict", "optim_state", "checkpoint", "tensor_classes")
COMMUNICATION = ("memory", "prefetching", "collectives", "comm", "differing_ranks", "devices")
# By package, the folders of its tests, as CONTRIBUTING.md groups them.
TESTS = {
    "core": (*STEP, *UNITS, *COMMUNICATION, "state_dict"),
    "runtime": (*STEP, *COMMUNICATION),
    "comm": (*COMMUNICATION, "strategies", "checkpoint"),
    "state": STATE,
    "checkpoint": (*STATE, "tools"),
}
COPIED = ("fsdp_flat", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "setup.py", "README.md")


def main(arguments: list[str]) -> int:
    """Draw mutants, run the suites on each, and print a line for each; return 1 if the quick suite misses too many."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="number of mistakes")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--packages", default=",".join(TESTS), help="packages in which they are made")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a run counts as a failure")
    parser.add_argument("--most", type=int, default=3, help="how many the cover may find that the quick suite misses")
    parser.add_argument("--list", action="store_true", help="only say which mistakes would be made")
    options = parser.parse_args(arguments)
    packages = options.packages.split(",")
    missed = 0
    for mutant in drawn(ROOT, [f"fsdp_flat/{package}" for package in packages], options.count, options.seed):
        found = "" if options.list else found_by(mutant, options.limit)
        missed += found == "cover"
        print(found, mutant.describe((ROOT / mutant.path).read_bytes()), sep="\t", flush=True)
    print(f"{missed} of {options.count} are found by the cover alone")
    return int(missed > options.most)


def found_by(mutant: Mutant, limit_s: float) -> str:
    """Return the smallest size of the suite that fails on a mutant, "quick" or "cover", or "none"."""
    folders = [f"tests/{folder}" for folder in TESTS[mutant.path.parts[1]]]
    with tempfile.TemporaryDirectory(prefix="fsdp_flat_mutant_") as name:
        root = Path(name)
        for each in COPIED:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
            copy(ROOT / each, root / each)
        (root / mutant.path).write_bytes(mutant.apply((ROOT / mutant.path).read_bytes()))
        for size in ("quick", "cover"):
            if fails(["--size", size, "-x", *folders], root, limit_s):
                return size
    return "none"


def fails(arguments: list[str], root: Path, limit_s: float) -> bool:
    """Return whether the suite of a copy of the project fails, or takes too long."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests", *arguments], cwd=root, env=environment, timeout=limit_s, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
