"""``python -m tests.gpu`` runs what the machine can in the time that there is: placeholders without an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import tests.gpu.__main__ as program
from tests.clients.conftest import NEEDS
from tests.gpu.__main__ import BENCHMARK, ROOT, TOO_LONG, Counts, Done, Part, parity_files, parts, run_parts, select

GPU = {"has_cuda": True, "clients": list(NEEDS)}


class Machine:
    """Runs parts in no time, on a clock that each of them turns.

    Args:
        answers: what parts answer, by their names; the others are well.
        pace: how many times longer a part takes than is expected of it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Done] | None = None, pace: float = 1.0):
        self.answers, self.pace, self.now = answers or {}, pace, 0.0
        self.ran: list[Part] = []
        self.said: list[str] = []
        monkeypatch.setattr(program.time, "monotonic", lambda: self.now)

    def run(self, part: Part, until: float) -> Done:
        self.ran.append(part)
        end = self.now + self.pace * part.seconds
        self.now = min(end, until)
        if end > until:
            return Done(TOO_LONG, None, "half of it")
        return self.answers.get(part.name, Done(0, Counts(3, 0, 1) if part.is_pytest else None, "its output"))

    def __call__(self, selected: Sequence[Part], seconds: float = 1e6, *, may_skip: bool = False) -> int:
        # On one core the parts run one after another.
        return run_parts(selected, seconds=seconds, may_skip=may_skip, num_cores=1, run=self.run, say=self.said.append)

    def names(self) -> list[str]:
        return [part.name for part in self.ran]


def test_without_an_accelerator_the_stand_ins_run_and_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert machine(parts(False, has_cuda=False), may_skip=True) == 0
    assert machine.ran[0].words == ("-m", "not gpu", "tests/gpu", "tests/rehearsal")
    assert machine.ran[1].words[:4] == ("benchmarks.gpu", "--device", "cpu", "--tiny")
    assert not any("TORCH_CUDA_SANITIZER" in part.environ for part in machine.ran)
    assert "-- tests\nits output" in machine.said
    assert any("3 tests ran, 0 failed, 1 skipped; well" in line for line in machine.said)


def test_with_a_gpu_the_sanitizer_runs_once_then_marked_tests_parity_and_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    assert machine(parts(True, **GPU)) == 0
    assert machine.names() == ["sanitizer", "one-rank", "devices", *(f"parity-{n}" for n in range(1, 5)), "clients"]
    over_nccl = [part.words for part in machine.ran if part.words[:2] == ("--transport", "nccl")]
    files = sorted(path for words in over_nccl for path in words if path.endswith(".py"))
    parity = sorted(path.relative_to(ROOT).as_posix() for path in parity_files())
    assert files == sorted([*parity, *(f"tests/clients/{name}" for name in NEEDS)]), "each file once"
    assert {"tests/training/test_training.py", "tests/training/test_torch_cases_core.py"} <= set(parity)
    assert {"tests/training/test_step_cases.py", "tests/mixed_precision/test_fully_shard.py"} <= set(parity)
    assert all((ROOT / path).exists() for path in files)
    marked = [words for words in (part.words for part in machine.ran) if words[:2] == ("-m", "gpu")]
    assert "tests/gpu/test_one_rank_on_devices.py" in marked[0]
    assert set(marked[1][2:]) == {
        *(f"tests/gpu/test_{name}.py" for name in ("checkpoints_on_devices", "examples_on_devices", "shared_gpu")),
        "tests/gpu/test_training_on_devices.py",
        "tests/loss_scaling/test_sharded_grad_scaler.py",
    }
    assert [part.words for part in machine.ran if part.environ == {"TORCH_CUDA_SANITIZER": "1"}] == [
        ("tests.gpu.one_rank",)
    ]


def test_a_failure_is_told_when_the_part_ends_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"devices": Done(1, Counts(4, 2, 0), "what failed")})
    every = parts(True, **GPU)
    assert machine(every) == 1
    assert machine.names() == [part.name for part in every]
    told = next(
        index for index, line in enumerate(machine.said) if "4 tests ran, 2 failed, 0 skipped; status 1" in line
    )
    assert machine.said[told - 1] == "-- devices\nwhat failed"
    assert told < machine.said.index("-- parity-1\nits output")


@pytest.mark.parametrize(
    ("seconds", "pace", "expected"),
    [
        # 60 % are for tests, and the benchmark gets what they leave.
        (900.0, 1.0, ["sanitizer", "one-rank", "devices", "parity-1", "benchmark"]),
        # The part that is too long is left out, a shorter one of less weight is not.
        (480.0, 1.0, ["sanitizer", "one-rank", "benchmark"]),
        (580.0, 1.0, ["sanitizer", "one-rank", "clients", "benchmark"]),
        # Where parts take longer than is expected of them, the last one is ended, and the benchmark has its time.
        (900.0, 2.0, ["sanitizer", "one-rank", "benchmark"]),
        (900.0, 1.5, ["sanitizer", "one-rank", "devices", "benchmark"]),
        # Too little for the benchmark.
        (190.0, 1.0, ["clients"]),
    ],
)
def test_parts_run_in_order_of_weight_as_far_as_time_goes(
    monkeypatch: pytest.MonkeyPatch, seconds: float, pace: float, expected: list[str]
) -> None:
    machine = Machine(monkeypatch, pace=pace)
    machine([*parts(True, **GPU), BENCHMARK], seconds)
    assert machine.names() == expected
    assert machine.now <= seconds
    left_out = [line for line in machine.said if line.startswith("-- left out")]
    assert len(left_out) == 9 - len(expected)


def test_the_benchmark_is_told_how_long_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine([*parts(True, **GPU), BENCHMARK], 900.0)
    # 120, 120, 150 and 120 s are gone.
    assert machine.ran[-1].words == ("benchmarks.gpu", "--minutes", "6.50")


def test_parts_are_selected_by_the_beginnings_of_their_names() -> None:
    every = parts(True, **GPU)
    assert [part.name for part in select(every, ["parity", "clients"])] == [
        *(f"parity-{number}" for number in range(1, 5)),
        "clients",
    ]
    assert select(every, []) == every
    with pytest.raises(ValueError, match="no part is called 'client_s' here; there are sanitizer, one-rank"):
        select(every, ["client_s"])
