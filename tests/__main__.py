"""Runs the whole suite as two pytest sessions side by side: ``python -m tests [pytest's options]``.

Most tests in ``APART`` start programs of their own or run in pytest's process, so they keep one core busy. Beside them
the other session runs most tests on worker ranks. A failure of either session is the result.
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
    "tests/composable",
    "tests/gpu",
    "tests/tools",
    "tests/versions",
    "tests/wrap",
    "tests/layout",
    "tests/compat/test_run.py",
    "tests/state_dict/test_async_save.py",
    "tests/surface/test_finetune_example.py",
)


def main(options: list[str]) -> int:
    """Run both sessions; print the output of one after that of the other, then the closing lines of both.

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
            status, closing = _followed([*pytest, *others])
            status = apart.wait() or status
        finally:
            apart.kill()
        log.seek(0)
        lines = log.read().splitlines()
    print(f"--- {' '.join(APART)} ---", *lines, sep="\n")
    print("--- both sessions ---", closing, lines[-1] if lines else "no output", sep="\n", flush=True)
    return status


def _followed(command: list[str]) -> tuple[int, str]:
    """Run a command and pass its output on; return its exit status and its last line."""
    last = b""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as session:
        assert session.stdout is not None
        # In small pieces, since pytest prints a line of dots over minutes.
        while piece := session.stdout.read1(4096):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            last = (last + piece)[-4096:]
    return session.wait(), last.decode(errors="replace").rstrip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
