"""Calls that the documentation shows pass a type checker in a user's file, and wrong ones do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("typed_program.py")
WRONG = {
    "wrong_state.py": 'FSDP(nn.Linear(2, 2), sync_module_states="sometimes")',
    "wrong_mesh.py": "FSDP(nn.Linear(2, 2), device_mesh=2)",
    "wrong_method.py": "fully_shard(nn.Linear(2, 2)).set_requires_gradient_sink(False)",
}
IMPORTS = (
    "from torch import nn\nfrom fsdp_flat import FullyShardedDataParallel as FSDP\nfrom fsdp_flat import fully_shard\n"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of the program and of each wrong call, from a folder of the user's own."""
    folder = tmp_path_factory.mktemp("user")
    (folder / PROGRAM.name).write_text(PROGRAM.read_text())
    for name, line in WRONG.items():
        (folder / name).write_text(IMPORTS + line + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--hide-error-context"]
    result = subprocess.run(
        [*command, *sorted(path.name for path in folder.iterdir())],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.mark.from_size("all", "runs mypy on a program and on all that it imports")
def test_calls_that_the_documentation_shows_pass_a_type_checker(report: list[str]) -> None:
    assert [line for line in report if line.startswith(PROGRAM.name)] == []


@pytest.mark.from_size("all", "runs mypy on a program and on all that it imports")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_does_not_pass(report: list[str], name: str) -> None:
    assert any(line.startswith(f"{name}:4: error: ") for line in report), report
