"""Runs the whole suite as three pytest sessions side by side: ``python -m tests [pytest's options]``.

While the ranks of one session wait for each other, for programs or for timeouts, those of another run. A failure of
any session is the result.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The folders and files of all sessions but one, which runs the others.
SESSIONS = (
    # Most of these start programs of their own or run in pytest's process.
    (
        "tests/examples",
        "tests/benchmarks",
        "tests/rehearsal",
        "tests/gpu",
        "tests/tools",
        "tests/versions",
        "tests/layout",
        "tests/compat",
        "tests/compile/test_compile.py",
        "tests/examples/test_finetune_example.py",
    ),
    (
        "tests/accumulation",
        "tests/checkpoint",
        "tests/clipping",
        "tests/mixed_precision",
        "tests/optim_state",
        "tests/state_dict",
        "tests/strategies",
        "tests/training",
        "tests/wrapping",
        "tests/site",
    ),
)
# Run by a command of their own.
APART = ("tests/fuzz", "tests/hosts", "tests/soak")


def main(options: list[str]) -> int:
    """Run all sessions; print the output of one as it comes, then that of the others, then all closing lines.

    Args:
        options: for each, such as ``-x`` or ``--all-combinations``.

    Returns:
        0 if all pass, else the exit status of one that failed.
    """
    pytest = [sys.executable, "-m", "pytest", "-q", *options]
    rest = [option for paths in (*SESSIONS, APART) for path in paths for option in ("--ignore", path)]
    with ExitStack() as stack:
        running = []
        for paths in SESSIONS:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen([*pytest, *paths], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.kill)
            running.append((paths, process, log))
        status, closing = _followed([*pytest, *rest])
        closings = [closing]
        for paths, process, log in running:
            status = process.wait() or status
            log.seek(0)
            lines = log.read().splitlines() or ["no output"]
            print(f"--- {' '.join(paths)} ---", *lines, sep="\n")
            closings.append(lines[-1])
    print("--- all sessions ---", *closings, sep="\n", flush=True)
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
