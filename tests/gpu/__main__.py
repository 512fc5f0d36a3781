"""``make gpu``: runs all that needs an accelerator, or without one what stands in for it on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ABSENT = "No accelerator here: what needs one is left out, and its placeholders run on the CPU."
# Statuses of pytest.
PASSED, NONE_COLLECTED = 0, 5
ROOT = Path(__file__).parents[2]


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


def commands(has_accelerator: bool, *, has_cuda: bool, benchmark: Sequence[str] = ()) -> list[Command]:
    """Return what is to run, in order.

    Args:
        has_accelerator: there is one.
        has_cuda: it is a CUDA device, which the sanitizer and the benchmark are for.
        benchmark: further arguments of the benchmark.
    """
    if not has_accelerator:
        tests = ("-m", "not gpu", "tests/gpu", "tests/rehearsal")
        tiny = ("--device", "cpu", "--tiny", "--rounds", "1")
        return [
            Command("tests on the CPU, and the rehearsal of an accelerator", tests, is_pytest=True),
            Command("the benchmark on the CPU, at sizes where its figures mean nothing", ("benchmarks.gpu", *tiny)),
        ]
    found = [Command("tests marked gpu", ("-m", "gpu", "tests"), is_pytest=True)]
    if has_cuda:
        sanitized = Command("the stream sanitizer", ("tests.gpu.one_rank",), {"TORCH_CUDA_SANITIZER": "1"})
        found += [sanitized, Command("the benchmark", ("benchmarks.gpu", *benchmark))]
    return found


def verdict(status: int, counts: Counts | None, *, may_skip: bool) -> str | None:
    """Say why a command counts as failed, or return None if it does not.

    Args:
        status: its exit status.
        counts: of tests, if it was pytest and reported any.
        may_skip: tests may be skipped, all of them too.
    """
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


def _run(command: Command) -> tuple[int, Counts | None]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **command.environ}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        prefix = ["pytest", "-q", f"--junitxml={report}"] if command.is_pytest else []
        words = [sys.executable, "-m", *prefix, *command.words]
        status = subprocess.run(words, cwd=ROOT, env=environ, check=False).returncode
        return status, counts_in(report) if command.is_pytest else None


def run_all(
    has_accelerator: bool,
    *,
    has_cuda: bool,
    benchmark: Sequence[str] = (),
    run: Callable[[Command], tuple[int, Counts | None]] = _run,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> int:
    """Run everything, also after a failure; returns 1 if anything failed, else 0.

    Args:
        has_accelerator, has_cuda, benchmark: as for :func:`commands`.
        run: runs a command and returns its status and the counts of its tests.
        say: prints a line.
    """
    if not has_accelerator:
        say(ABSENT)
    failed = False
    for command in commands(has_accelerator, has_cuda=has_cuda, benchmark=benchmark):
        say(f"-- {command.title}")
        status, counts = run(command)
        problem = verdict(status, counts, may_skip=not has_accelerator)
        failed = failed or problem is not None
        told = [] if counts is None else [str(counts)]
        say(f"-- {command.title}: {'; '.join([*told, problem or 'well'])}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(
        run_all(torch.accelerator.is_available(), has_cuda=torch.cuda.is_available(), benchmark=tuple(sys.argv[1:]))
    )
