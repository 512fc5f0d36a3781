"""Runs the scripts of ``tests/scripts``, on a rank of the pool or as separate commands."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.pool import spawn

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run_script(script: Path, function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of a script on this rank, in the pool's process group."""
    namespace = runpy.run_path(str(script), run_name="script")
    with warnings.catch_warnings():
        # torch's FSDP1 is deprecated, and torch's checkpoints use deprecated names.
        warnings.filterwarnings("ignore", module="" if script.parent == SCRIPTS else r"torch\.")
        return namespace[function](*arguments, **options)


def command(*words: object) -> str:
    """Run this Python with the given arguments and return its output; assert that it succeeds."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def torchrun(num_ranks: int, *words: object) -> str:
    """Run torchrun and return its output and that of its ranks."""
    return command("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, *words)


def run_program(num_ranks: int, folder: Path, script: Path, *arguments: object) -> str:
    """Run a script as the ranks of a job that torchrun starts would, in forked processes; return what they print.

    It takes a tenth of the time, since nothing is imported again.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    spawn(_run_rank, num_ranks, store.port, folder, script, arguments, num_ranks=num_ranks)
    return "".join((folder / f"printed-{rank}.txt").read_text() for rank in range(num_ranks))


def _run_rank(rank: int, num_ranks: int, port: int, folder: Path, script: Path, arguments: tuple[object, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    os.chdir(folder)
    with open(f"printed-{rank}.txt", "w", buffering=1) as printed:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(printed.fileno(), stream.fileno())
        sys.argv = [str(script), *map(str, arguments)]
        sys.path.insert(0, str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.stdout.flush()


def printed_losses(output: str) -> list[float]:
    """Return the losses that a script printed."""
    return [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]


def assert_equal_losses(found: list[float], expected: list[float]) -> None:
    """Assert that the losses agree, and that there are at least three, all different."""
    __tracebackhide__ = True
    assert len(found) >= 3
    assert len(set(expected)) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
