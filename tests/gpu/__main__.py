"""``make gpu``: runs all that needs an accelerator, or without one what stands in for it on the CPU.

Parts run beside each other where there are cores for it, and each says how long it took. On a CUDA device tests beside
torch's FSDP1 (:func:`parity_files`) and clients run over NCCL on ranks that share it (``tests/support/transport.py``).
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

ABSENT = "No accelerator here: what needs one is left out, and its placeholders run on the CPU."
NO_CLIENTS = "The client libraries are not installed beside torch: their tests are left out."
# Statuses of pytest, and of a part that was ended because it took too long.
PASSED, NONE_COLLECTED, TOO_LONG = 0, 5, -1
ROOT = Path(__file__).parents[2]
# In all: parts that still run then are ended.
LIMIT_S = 580.0
# Processes that a part keeps busy: a session and its ranks.
_CORES_OF_A_PART = 3
_NUM_PARITY_PARTS = 4
# Tests beside torch's FSDP1 that train by means of their own.
_MORE_PARITY_FILES = ("test_local_calls.py", "test_torchs_test_helpers.py")
_CLIENTS = ("accelerate", "transformers", "lightning", "peft", "torchtitan", "torchtnt")
# Of tests/clients, those that take the ranks' device; the others name the CPU, or one device for each rank.
_CLIENT_TESTS = ("test_hugging_face.py", "test_peft.py", "test_torchtitan.py", "test_transformers.py")


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to run.

    Attributes:
        title: one line that says so.
        words: arguments of Python.
        environ: what is added to the environment.
        is_pytest: it runs tests, which are counted.
    """

    title: str
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    is_pytest: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tests ran, failed among them, and how many were skipped."""

    ran: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        return f"{self.ran} tests ran, {self.failed} failed, {self.skipped} skipped"


def commands(has_accelerator: bool, *, has_cuda: bool, has_clients: bool = False) -> list[Command]:
    """Return what is to run, what takes longest first.

    Args:
        has_accelerator: there is one.
        has_cuda: it is a CUDA device, which NCCL and the sanitizer are for.
        has_clients: the packages of ``tests/clients`` are installed.
    """
    if not has_accelerator:
        tests = ("-m", "not gpu", "tests/gpu", "tests/rehearsal")
        tiny = ("--device", "cpu", "--tiny", "--rounds", "1", "--rows", "1.2B-60")
        return [
            Command("tests on the CPU, and the rehearsal of an accelerator", tests, is_pytest=True),
            Command("the benchmark on the CPU, at sizes where its figures mean nothing", ("benchmarks.gpu", *tiny)),
        ]
    if not has_cuda:
        return [Command("tests marked gpu", ("-m", "gpu", "tests"), is_pytest=True)]
    over_nccl = ("--transport", "nccl")
    found = [
        Command(f"parity over NCCL, {number} of {_NUM_PARITY_PARTS}", (*over_nccl, *files), is_pytest=True)
        for number, files in enumerate(_parity_parts(), start=1)
    ]
    # Those in tests/gpu start many programs (the examples) or train in many ways; the others are mostly faults.
    found += [
        Command("tests marked gpu in tests/gpu", ("-m", "gpu", "tests/gpu"), is_pytest=True),
        Command("tests marked gpu, faults among them", ("-m", "gpu", "--ignore=tests/gpu", "tests"), is_pytest=True),
        Command("the stream sanitizer", ("tests.gpu.one_rank",), {"TORCH_CUDA_SANITIZER": "1"}),
    ]
    if has_clients:
        files = tuple(f"tests/clients/{name}" for name in _CLIENT_TESTS)
        found.append(Command("clients over NCCL", (*over_nccl, *files), is_pytest=True))
    return found


def parity_files() -> list[Path]:
    """Return the files of tests that train beside torch's FSDP1, those of its own suites' cases among them."""
    return [
        path
        for path in (ROOT / "tests").glob("*/test_*.py")
        if "torch_cases" in path.name
        or path.name in _MORE_PARITY_FILES
        or re.search(r"^from tests\.support\.(both_sides|torch_and_ours) import", path.read_text(), re.MULTILINE)
    ]


def _parity_parts() -> list[tuple[str, ...]]:
    """Return the files of :func:`parity_files` in parts of about the same size."""
    files = sorted(parity_files(), key=lambda path: -path.stat().st_size)
    parts: list[list[Path]] = [[] for _ in range(_NUM_PARITY_PARTS)]
    for path in files:
        min(parts, key=lambda part: sum(each.stat().st_size for each in part)).append(path)
    return [tuple(path.relative_to(ROOT).as_posix() for path in sorted(part)) for part in parts]


def verdict(status: int, counts: Counts | None, *, may_skip: bool) -> str | None:
    """Say why a command counts as failed, or return None if it does not.

    Args:
        status: its exit status.
        counts: of tests, if it was pytest and reported any.
        may_skip: tests may be skipped, all of them too.
    """
    if status == TOO_LONG:
        return f"ended after the {LIMIT_S:.0f} s that all parts have"
    if status == NONE_COLLECTED and counts is not None and counts.ran == 0:
        return None if may_skip else "no test was selected"
    if status != PASSED:
        return f"status {status}"
    if counts is not None and counts.ran == 0 and not may_skip:
        return "every test was skipped"
    return None


def counts_in(report: Path) -> Counts:
    """Read the counts from a JUnit report; zeros if pytest has written none."""
    if not report.exists():
        return Counts(0, 0, 0)
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return Counts(tests - skipped, failures + errors, skipped)


@dataclass(frozen=True, slots=True)
class Done:
    """Describes a command that has ended.

    Attributes:
        status: its exit status, or ``TOO_LONG``.
        counts: of its tests, if it was pytest.
        output: all that it printed.
    """

    status: int
    counts: Counts | None
    output: str = ""


def run_command(command: Command, until: float) -> Done:
    """Run a command; end it and its processes at the time ``until`` of the monotonic clock."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **command.environ}
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        prefix = ["pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"] if command.is_pytest else []
        words = [sys.executable, "-m", *prefix, *command.words]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = TOO_LONG
                # Ranks end by themselves when the session has ended.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Done(status, counts_in(report) if command.is_pytest else None, log.read_text(errors="replace"))


def run_all(
    has_accelerator: bool,
    *,
    has_cuda: bool,
    has_clients: bool = False,
    num_cores: int | None = None,
    run: Callable[[Command, float], Done] = run_command,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> int:
    """Run everything, also after a failure; returns 1 if anything failed, else 0.

    Args:
        has_accelerator, has_cuda, has_clients: as for :func:`commands`.
        num_cores: cores of this machine, by which parts run beside each other.
        run: runs a command until a time at most.
        say: prints a line.
    """
    if not has_accelerator:
        say(ABSENT)
    elif has_cuda and not has_clients:
        say(NO_CLIENTS)
    begun = time.monotonic()
    num_beside = max(1, (num_cores or os.cpu_count() or 1) // _CORES_OF_A_PART)
    took: dict[str, float] = {}

    def timed(command: Command) -> Done:
        start = time.monotonic()
        try:
            return run(command, begun + LIMIT_S)
        finally:
            took[command.title] = time.monotonic() - start

    failed = []
    closing = []
    with ThreadPoolExecutor(num_beside) as threads:
        parts = commands(has_accelerator, has_cuda=has_cuda, has_clients=has_clients)
        running = {threads.submit(timed, command): command for command in parts}
        for future in as_completed(running):
            command, done = running[future], future.result()
            problem = verdict(done.status, done.counts, may_skip=not has_accelerator)
            failed += [] if problem is None else [command]
            say(f"-- {command.title}")
            say(done.output.rstrip())
            told = [] if done.counts is None else [str(done.counts)]
            closing.append(f"-- {took[command.title]:6.1f} s  {command.title}: {'; '.join([*told, problem or 'well'])}")
    for line in closing:
        say(line)
    say(f"-- {time.monotonic() - begun:6.1f} s  in all, {num_beside} parts beside each other")
    return int(bool(failed))


def _has_clients() -> bool:
    return all(importlib.util.find_spec(name) for name in _CLIENTS)


def main(argv: Sequence[str]) -> int:
    """Run what this machine can; takes no arguments."""
    if argv:
        raise SystemExit(f"make gpu takes no arguments, got {list(argv)}: the benchmark is make bench-gpu.")
    return run_all(torch.accelerator.is_available(), has_cuda=torch.cuda.is_available(), has_clients=_has_clients())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
