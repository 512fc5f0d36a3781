"""``make gpu`` runs what the machine can: everything on an accelerator, placeholders without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu.__main__ import ABSENT, ROOT, Command, Counts, commands, counts_in, run_all, verdict


def outcome(
    has_accelerator: bool, answers: dict[str, tuple[int, Counts | None]], *, has_cuda: bool | None = None
) -> tuple[int, list[Command], list[str]]:
    """Return the status, what was run and what was said, where commands answer by their first word."""
    ran: list[Command] = []
    said: list[str] = []

    def run(command: Command) -> tuple[int, Counts | None]:
        ran.append(command)
        return answers.get(command.words[0], (0, Counts(3, 0, 1) if command.is_pytest else None))

    cuda = has_accelerator if has_cuda is None else has_cuda
    return run_all(has_accelerator, has_cuda=cuda, run=run, say=said.append), ran, said


def test_without_an_accelerator_the_stand_ins_run_and_all_is_well() -> None:
    status, ran, said = outcome(False, {})
    assert status == 0
    assert said[0] == ABSENT
    assert "\n" not in ABSENT
    assert ran[0].words == ("-m", "not gpu", "tests/gpu", "tests/rehearsal")
    assert ran[1].words[:4] == ("benchmarks.gpu", "--device", "cpu", "--tiny")
    assert not any("TORCH_CUDA_SANITIZER" in command.environ for command in ran)
    assert "3 tests ran, 0 failed, 1 skipped" in said[2]


def test_with_an_accelerator_tests_sanitizer_and_benchmark_run() -> None:
    status, ran, said = outcome(True, {})
    assert status == 0
    assert ABSENT not in said
    assert [command.words[0] for command in ran] == ["-m", "tests.gpu.one_rank", "benchmarks.gpu"]
    assert ran[0].words == ("-m", "gpu", "tests")
    assert ran[1].environ == {"TORCH_CUDA_SANITIZER": "1"}
    assert commands(True, has_cuda=True, benchmark=("--rounds", "5"))[-1].words == ("benchmarks.gpu", "--rounds", "5")


def test_what_is_for_cuda_does_not_run_on_other_accelerators() -> None:
    _, ran, _ = outcome(True, {}, has_cuda=False)
    assert [command.words[0] for command in ran] == ["-m"]


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_a_failure_is_told_and_the_rest_runs(has_accelerator: bool) -> None:
    status, ran, said = outcome(has_accelerator, {"-m": (1, Counts(4, 2, 0))})
    assert status == 1
    assert len(ran) == len(commands(has_accelerator, has_cuda=has_accelerator))
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
