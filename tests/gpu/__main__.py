"""Runs all that needs an accelerator, or without one what stands in for it on the CPU: ``python3 -m tests.gpu``.

It needs torch, and for tests pytest and hypothesis; what is not installed is left out by name. Parts run beside each
other where there are cores for it, in order of weight as far as time goes, and each prints its result when it ends.
``--only parity`` selects parts, ``--all --minutes 14`` adds the benchmark, which gets the time that tests leave. On a
CUDA device tests beside torch's FSDPs (:func:`parity_files`) and clients run over NCCL on ranks that share it
(``tests/support/transport.py``).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.gpu_rows import next_to_run
from tests.clients.conftest import NEEDS, missing
from tests.gpu.one_rank import HAS_TORCHAO, NEED_TORCHAO

ABSENT = "No accelerator here: what needs one is left out, and its placeholders run on the CPU."
# Statuses of pytest, and of a part that was ended because it took too long.
PASSED, NONE_COLLECTED, TOO_LONG = 0, 5, -1
ROOT = Path(__file__).parents[2]
MINUTES = 9.5
# What tests take at most of the time of ``--all``; the benchmark gets the rest.
TESTS_SHARE = 0.6
# Processes that a part keeps busy: a session and its ranks.
_CORES_OF_A_PART = 3
# Seconds in which pytest prints what has failed, once its time is over.
_CLOSING_S = 10.0
_NUM_PARITY_PARTS = 4
_ONE_RANK = "tests/gpu/test_one_rank_on_devices.py"
# Tests beside torch's FSDP1 that train by means of their own.
_MORE_PARITY_FILES = ("test_local_calls.py", "test_torchs_test_helpers.py")
# Tests beside torch's fully_shard that are of gloo, of the CPU, or of streams that are not the device's.
_NOT_OVER_NCCL = (
    "test_custom_collectives_of_fully_shard.py",
    "test_hooks_and_events.py",
    "test_modules_of_fully_shard.py",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to run.

    Attributes:
        name: by which ``--only`` selects it.
        title: one line that says what it is.
        words: arguments of Python.
        seconds: what it is expected to take, on an H200 or where it stands in on 2 cores.
        environ: what is added to the environment.
        is_pytest: it runs tests, which are counted.
    """

    name: str
    title: str
    words: tuple[str, ...]
    seconds: float
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


BENCHMARK = Part("benchmark", "the benchmark of one GPU", ("benchmarks.gpu",), 120.0)


def parts(has_accelerator: bool, *, has_cuda: bool, clients: Sequence[str] = ()) -> list[Part]:
    """Return what is to run, in order of weight, without the benchmark of a GPU.

    Args:
        has_accelerator: there is one.
        has_cuda: it is a CUDA device, which NCCL and the sanitizer are for.
        clients: files of ``tests/clients`` whose packages are installed.
    """
    if not has_accelerator:
        tests = ("-m", "not gpu", "tests/gpu", "tests/rehearsal")
        tiny = ("benchmarks.gpu", "--device", "cpu", "--tiny", "--rounds", "1", "--minutes", "1", "--rows", "1.2B-60")
        return [
            Part("tests", "tests on the CPU, and the rehearsal of an accelerator", tests, 300.0, is_pytest=True),
            Part("trial", "the benchmark on the CPU, at sizes where its figures mean nothing", tiny, 30.0),
        ]
    if not has_cuda:
        files = (path.relative_to(ROOT).as_posix() for path in marked_files())
        return [Part("devices", "tests marked gpu", ("-m", "gpu", *files), 240.0, is_pytest=True)]
    over_nccl = ("--transport", "nccl")
    sanitized = {"TORCH_CUDA_SANITIZER": "1"}
    # By file: to collect all tests imports what is not installed.
    marked = sorted(path.relative_to(ROOT).as_posix() for path in marked_files())
    one_rank, others = [path for path in marked if path == _ONE_RANK], [path for path in marked if path != _ONE_RANK]
    found = [
        Part("sanitizer", "the stream sanitizer", ("tests.gpu.one_rank",), 120.0, sanitized),
        Part("one-rank", "waits and memory of one rank", ("-m", "gpu", *one_rank), 120.0, is_pytest=True),
        Part("devices", "other tests marked gpu", ("-m", "gpu", *others), 150.0, is_pytest=True),
    ]
    found += [
        Part(
            f"parity-{number}",
            f"parity over NCCL, {number} of {_NUM_PARITY_PARTS}",
            (*over_nccl, "-k", "not on_the_cpu", *files),
            120.0,
            is_pytest=True,
        )
        for number, files in enumerate(_parity_parts(), start=1)
    ]
    if clients:
        files = tuple(f"tests/clients/{name}" for name in clients)
        found.append(Part("clients", "clients over NCCL", (*over_nccl, *files), 100.0, is_pytest=True))
    return found


def marked_files() -> list[Path]:
    """Return the files of tests some of which are marked gpu, by the mark itself or by a name of ``accelerator``."""
    tests = (ROOT / "tests").glob("*/test_*.py")
    return [path for path in tests if re.search(r"mark\.gpu\b|^from tests\.gpu\.accel", path.read_text(), re.MULTILINE)]


def parity_files() -> list[Path]:
    """Return the files of tests that train beside torch's FSDPs, those of its own suites' cases among them."""
    return [path for path in (ROOT / "tests").glob("*/test_*.py") if _is_parity(path)]


def _is_parity(path: Path) -> bool:
    text = path.read_text()
    is_of_helpers = re.search(r"^from tests\.support\.(both_sides|torch_and_ours) import", text, re.MULTILINE)
    is_beside = re.search(r"^from tests\.support\.beside import [^)]*?\b(BOTH|FRONTS_AND_TORCH)\b", text, re.MULTILINE)
    is_named = "torch_cases" in path.name or path.name in _MORE_PARITY_FILES
    return bool(is_named or is_of_helpers or (is_beside and path.name not in _NOT_OVER_NCCL))


def _parity_parts() -> list[tuple[str, ...]]:
    """Return the files of :func:`parity_files` in parts of about the same size."""
    files = sorted(parity_files(), key=lambda path: -path.stat().st_size)
    parts: list[list[Path]] = [[] for _ in range(_NUM_PARITY_PARTS)]
    for path in files:
        min(parts, key=lambda part: sum(each.stat().st_size for each in part)).append(path)
    return [tuple(path.relative_to(ROOT).as_posix() for path in sorted(part)) for part in parts]


def verdict(status: int, counts: Counts | None, *, may_skip: bool) -> str | None:
    """Say why a part counts as failed, or return None if it does not.

    Args:
        status: its exit status.
        counts: of tests, if it was pytest and reported any.
        may_skip: tests may be skipped, all of them too.
    """
    if status == TOO_LONG:
        return "ended, since its time was over"
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
    """Describes a part that has ended.

    Attributes:
        status: its exit status, or ``TOO_LONG``.
        counts: of its tests, if it was pytest.
        output: all that it printed.
    """

    status: int
    counts: Counts | None
    output: str = ""


def run_part(part: Part, until: float) -> Done:
    """Run a part; end it and its processes at the time ``until`` of the monotonic clock."""
    # The package need not be installed.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **part.environ}
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        prefix = ["pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"] if part.is_pytest else []
        words = [sys.executable, "-m", *prefix, *part.words]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(max(0.0, until - time.monotonic() - _CLOSING_S))
            except subprocess.TimeoutExpired:
                status = TOO_LONG
                _end(process)
        return Done(status, counts_in(report) if part.is_pytest else None, log.read_text(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and its processes; pytest gets a moment to print what has failed so far."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSING_S)
    # Ranks end by themselves when the session has ended.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_parts(
    selected: Sequence[Part],
    *,
    seconds: float,
    may_skip: bool,
    num_cores: int | None = None,
    run: Callable[[Part, float], Done] = run_part,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> int:
    """Run parts beside each other, the benchmark alone after them; returns 1 if anything failed, else 0.

    Args:
        selected: parts in order of weight.
        seconds: time for all: a part that cannot be expected to end in it is left out, one that has not is ended.
        may_skip: tests may be skipped, all of them too.
        num_cores: cores of this machine, by which parts run beside each other.
        run: runs a part until a time at most.
        say: prints a line.
    """
    begun = time.monotonic()
    tests = {part.name: part for part in selected if part.name != BENCHMARK.name}
    has_both = 0 < len(tests) < len(selected)
    tests_until = begun + seconds * (TESTS_SHARE if has_both else 1.0)
    num_beside = max(1, min(len(tests), (num_cores or os.cpu_count() or 1) // _CORES_OF_A_PART))
    expected = {name: part.seconds for name, part in tests.items()}
    done = dict.fromkeys(tests, 0)
    results: list[str] = []
    failed: list[str] = []
    lock = threading.Lock()

    def finish(part: Part, until: float) -> None:
        start = time.monotonic()
        result = run(part, until)
        problem = verdict(result.status, result.counts, may_skip=may_skip)
        told = [] if result.counts is None else [str(result.counts)]
        line = (
            f"-- {time.monotonic() - start:6.1f} s  {part.name}: {part.title}: {'; '.join([*told, problem or 'well'])}"
        )
        with lock:
            say(f"-- {part.name}\n{result.output.rstrip()}")
            say(line)
            results.append(line)
            failed.extend([part.name] if problem else [])

    def work() -> None:
        while True:
            with lock:
                name = next_to_run(done, expected, tests_until - time.monotonic())
                if name is None:
                    return
                done[name] = 1
            finish(tests[name], tests_until)

    with ThreadPoolExecutor(num_beside) as threads:
        for future in [threads.submit(work) for _ in range(num_beside)]:
            future.result()
    until = begun + seconds
    left_out = [tests[name] for name, count in done.items() if not count]
    for part in (part for part in selected if part.name == BENCHMARK.name):
        left_s = until - time.monotonic()
        if left_s < part.seconds:
            left_out.append(part)
        else:
            finish(replace(part, words=(*part.words, "--minutes", f"{left_s / 60:.2f}")), until)
    say("-- results")
    for line in results:
        say(line)
    for part in left_out:
        say(f"-- left out: {part.name}, which is expected to take {part.seconds:.0f} s")
    say(f"-- {time.monotonic() - begun:6.1f} s  in all, {num_beside} parts beside each other")
    return int(bool(failed))


def select(every: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Return the parts whose names begin with one of ``only``, all if it is empty.

    Raises:
        ValueError: no part has such a name.
    """
    for name in only:
        if not any(part.name.startswith(name) for part in every):
            raise ValueError(f"no part is called {name!r} here; there are {', '.join(part.name for part in every)}.")
    return [part for part in every if not only or part.name.startswith(tuple(only))]


def main(argv: Sequence[str]) -> int:
    """Run what this machine can."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts, or the beginnings of their names")
    parser.add_argument("--all", action="store_true", help="the benchmark too")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time for everything ({MINUTES:g})")
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error(f"--minutes is a time above 0, got {args.minutes:g}")
    has_accelerator, has_cuda = torch.accelerator.is_available(), torch.cuda.is_available()
    clients = [name for name in NEEDS if not missing(name)]
    every = parts(has_accelerator, has_cuda=has_cuda, clients=clients)
    if not has_accelerator:
        print(ABSENT)
    if has_cuda:
        every += [BENCHMARK]
        for name in NEEDS:
            if missing(name):
                print(f"Left out: tests/clients/{name}, since {' and '.join(missing(name))} is not installed.")
        if not HAS_TORCHAO:
            print(f"Left out: {' and '.join(NEED_TORCHAO)} weights of one rank, since torchao is not installed.")
    without = [name for name in ("pytest", "hypothesis") if not importlib.util.find_spec(name)]
    if without:
        print(f"Left out: all tests, since {' and '.join(without)} is not installed.")
        every = [part for part in every if not part.is_pytest]
    try:
        selected = select(every, args.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    if not args.all and not args.only:
        selected = [part for part in selected if part.name != BENCHMARK.name]
    return run_parts(selected, seconds=60 * args.minutes, may_skip=not has_accelerator)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
