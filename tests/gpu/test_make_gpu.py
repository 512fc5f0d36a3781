"""``make gpu`` runs what the machine can: everything on an accelerator, placeholders without one."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.gpu.__main__ import (
    ABSENT,
    NO_CLIENTS,
    ROOT,
    TOO_LONG,
    Command,
    Counts,
    Done,
    commands,
    counts_in,
    parity_files,
    run_all,
    run_command,
    verdict,
)


def outcome(
    has_accelerator: bool, answers: dict[str, Done], *, has_cuda: bool | None = None, **options: Any
) -> tuple[int, list[Command], list[str]]:
    """Return the status, what was run and what was said, where commands answer by their first word."""
    ran: list[Command] = []
    said: list[str] = []

    def run(command: Command, _until: float) -> Done:
        ran.append(command)
        return answers.get(command.words[0], Done(0, Counts(3, 0, 1) if command.is_pytest else None, "its output"))

    cuda = has_accelerator if has_cuda is None else has_cuda
    return run_all(has_accelerator, has_cuda=cuda, num_cores=1, run=run, say=said.append, **options), ran, said


def test_without_an_accelerator_the_stand_ins_run_and_all_is_well() -> None:
    status, ran, said = outcome(False, {})
    assert status == 0
    assert said[0] == ABSENT
    assert "\n" not in ABSENT
    assert ran[0].words == ("-m", "not gpu", "tests/gpu", "tests/rehearsal")
    assert ran[1].words[:4] == ("benchmarks.gpu", "--device", "cpu", "--tiny")
    assert not any("TORCH_CUDA_SANITIZER" in command.environ for command in ran)
    assert "its output" in said
    assert any("3 tests ran, 0 failed, 1 skipped; well" in line for line in said)


def test_part_7_with_a_gpu_parity_sanitizer_faults_examples_and_clients_run() -> None:
    status, ran, said = outcome(True, {}, has_clients=True)
    assert status == 0
    assert not {ABSENT, NO_CLIENTS} & set(said)
    words = [command.words for command in ran]
    over_nccl = [part for part in words if part[:2] == ("--transport", "nccl")]
    files = sorted(path for part in over_nccl for path in part[2:])
    clients = [path for path in files if path.startswith("tests/clients/")]
    parity = sorted(path.relative_to(ROOT).as_posix() for path in parity_files())
    assert [path for path in files if path not in clients] == parity, "each file once"
    assert {"tests/training/test_training.py", "tests/accumulation/test_torch_cases.py"} <= set(parity)
    assert len(clients) == 4
    assert all((ROOT / path).exists() for path in files)
    assert ("-m", "gpu", "tests/gpu") in words
    assert ("-m", "gpu", "--ignore=tests/gpu", "tests") in words
    assert [command.environ for command in ran if command.words == ("tests.gpu.one_rank",)] == [
        {"TORCH_CUDA_SANITIZER": "1"}
    ]


def test_part_7_absent_clients_are_told_and_left_out() -> None:
    _, ran, said = outcome(True, {})
    assert said[0] == NO_CLIENTS
    assert not any("clients" in word for command in ran for word in command.words)


def test_what_is_for_cuda_does_not_run_on_other_accelerators() -> None:
    _, ran, _ = outcome(True, {}, has_cuda=False)
    assert [command.words for command in ran] == [("-m", "gpu", "tests")]


def test_part_7_the_time_of_each_part_and_of_all_is_told() -> None:
    _, ran, said = outcome(True, {})
    times = [line for line in said if re.match(r"-- +\d+\.\d s  ", line)]
    assert len(times) == len(ran) + 1
    assert {line.split("s  ", 1)[1].split(":")[0] for line in times[:-1]} == {command.title for command in ran}
    assert times[-1].endswith("in all, 1 parts beside each other")


def test_part_7_parts_run_beside_each_other_where_there_are_cores() -> None:
    together = threading.Barrier(4, timeout=30)

    def run(command: Command, _until: float) -> Done:
        if command.title.startswith("parity"):
            together.wait()
        return Done(0, Counts(1, 0, 0) if command.is_pytest else None)

    assert run_all(True, has_cuda=True, num_cores=16, run=run, say=lambda _: None) == 0


def test_part_7_a_part_that_takes_too_long_is_ended_with_its_processes_and_fails(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    module = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
    command = Command("sleeps", ("timeit", "-n1", "-r1", "-s", module, "time.sleep(60)"))
    popen = subprocess.Popen

    def started_popen(*words: Any, **options: Any) -> Any:
        process = popen(*words, **options)
        deadline = time.monotonic() + 60.0
        while not started.exists() or not started.read_text():
            assert time.monotonic() < deadline, "the child has not started"
            time.sleep(0.05)
        return process

    with mock.patch.object(subprocess, "Popen", started_popen):
        done = run_command(command, time.monotonic())
    assert done.status == TOO_LONG
    stat = Path("/proc") / started.read_text() / "stat"
    # Ended, if not yet collected by the process that took it over; a loaded machine takes a while to end it.
    deadline = time.monotonic() + 30.0
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, stat.read_text()
        time.sleep(0.1)
    assert verdict(done.status, None, may_skip=True) == "ended after the 580 s that all parts have"
    done = run_command(Command("prints", ("this",)), time.monotonic() + 60.0)
    assert (done.status, done.counts) == (0, None)
    assert "Zen of Python" in done.output


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_a_failure_is_told_and_the_rest_runs(has_accelerator: bool) -> None:
    status, ran, said = outcome(has_accelerator, {"-m": Done(1, Counts(4, 2, 0), "what failed")})
    assert status == 1
    assert len(ran) == len(commands(has_accelerator, has_cuda=has_accelerator))
    assert "what failed" in said
    assert any("4 tests ran, 2 failed, 0 skipped; status 1" in line for line in said)


@pytest.mark.parametrize(
    ("status", "counts", "may_skip", "problem"),
    [
        (0, Counts(3, 0, 0), False, None),
        (0, None, False, None),
        (5, Counts(0, 0, 0), True, None),
        (5, Counts(0, 0, 0), False, "no test was selected"),
        (0, Counts(0, 0, 7), True, None),
        (0, Counts(0, 0, 7), False, "every test was skipped"),
        (2, Counts(0, 0, 0), True, "status 2"),
        (5, None, True, "status 5"),
        (1, None, True, "status 1"),
        (TOO_LONG, None, True, "ended after the 580 s that all parts have"),
    ],
)
def test_an_accelerator_without_tests_is_a_failure_and_no_tests_without_one_is_none(
    status: int, counts: Counts | None, may_skip: bool, problem: str | None
) -> None:
    assert verdict(status, counts, may_skip=may_skip) == problem


def test_tests_are_counted_in_the_report_of_pytest(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert counts_in(report) == Counts(0, 0, 0)
    report.write_text('<testsuites><testsuite errors="1" failures="2" skipped="3" tests="9"/></testsuites>')
    assert counts_in(report) == Counts(6, 3, 3)


def test_the_makefile_has_the_target() -> None:
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^gpu: .*\n\t.*python -m tests\.gpu", text, re.MULTILINE)
    assert re.search(r"^\.PHONY:.*\bgpu\b", text, re.MULTILINE)
