"""``make gpu`` runs what the machine can: everything on an accelerator, placeholders without one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.__main__ import (
    ABSENT,
    NO_CLIENTS,
    ROOT,
    Command,
    Counts,
    Done,
    commands,
    parity_files,
    run_all,
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


def test_with_a_gpu_parity_sanitizer_faults_examples_and_clients_run() -> None:
    status, ran, said = outcome(True, {}, has_clients=True)
    assert status == 0
    assert not {ABSENT, NO_CLIENTS} & set(said)
    words = [command.words for command in ran]
    over_nccl = [part for part in words if part[:2] == ("--transport", "nccl")]
    files = sorted(path for part in over_nccl for path in part[2:])
    clients = [path for path in files if path.startswith("tests/clients/")]
    parity = sorted(path.relative_to(ROOT).as_posix() for path in parity_files())
    assert [path for path in files if path not in clients] == parity, "each file once"
    assert {"tests/training/test_training.py", "tests/training/test_torch_cases_core.py"} <= set(parity)
    assert len(clients) == 4
    assert all((ROOT / path).exists() for path in files)
    assert ("-m", "gpu", "tests/gpu") in words
    assert ("-m", "gpu", "--ignore=tests/gpu", "tests") in words
    assert [command.environ for command in ran if command.words == ("tests.gpu.one_rank",)] == [
        {"TORCH_CUDA_SANITIZER": "1"}
    ]


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_a_failure_is_told_and_the_rest_runs(has_accelerator: bool) -> None:
    status, ran, said = outcome(has_accelerator, {"-m": Done(1, Counts(4, 2, 0), "what failed")})
    assert status == 1
    assert len(ran) == len(commands(has_accelerator, has_cuda=has_accelerator))
    assert "what failed" in said
    assert any("4 tests ran, 2 failed, 0 skipped; status 1" in line for line in said)
