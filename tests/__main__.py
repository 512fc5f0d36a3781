"""Runs the whole suite as two pytest sessions side by side: ``python -m tests [pytest's options]``.

The tests in ``APART`` start programs of their own or run in pytest's process, so they keep one core busy. Beside them
the other session runs the tests on worker ranks. A failure of either session is the result.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
APART = (
    "tests/examples",
    "tests/benchmarks",
    "tests/rehearsal",
    "tests/gpu",
    "tests/tools",
    "tests/versions",
    "tests/wrap",
    "tests/layout",
    "tests/compat/test_run.py",
    "tests/surface/test_finetune_example.py",
)


def main(options: list[str]) -> int:
    """Run both sessions, and print one after the other.

    Args:
        options: for both, such as ``-x`` or ``--all-combinations``.

    Returns:
        0 if both pass, else the exit status of one that failed.
    """
    pytest = [sys.executable, "-m", "pytest", "-q", *options]
    others = [option for path in APART for option in ("--ignore", path)]
    with tempfile.TemporaryFile("w+") as log:
        apart = subprocess.Popen([*pytest, *APART], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = subprocess.run([*pytest, *others], cwd=ROOT, check=False).returncode
            status = apart.wait() or status
        finally:
            apart.kill()
        log.seek(0)
        print(f"--- {' '.join(APART)} ---", log.read(), sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
