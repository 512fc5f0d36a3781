"""README and docs/command.md show what commands print: each console block is run on the checkpoints of the tests."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.tools.conftest import Run

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def steps_of(text: str) -> list[tuple[str, str]]:
    """The commands in console blocks, each with the output below it."""
    shown = "".join(_BLOCK.findall(text))
    parts = re.split(r"^\$ ", shown, flags=re.MULTILINE)[1:]
    return [(line, output) for line, _, output in (part.partition("\n") for part in parts)]


@pytest.mark.every_value_in_quick("each page shows other commands")
@pytest.mark.parametrize("page", ["README.md", "docs/command.md"])
def test_each_command_of_the_page_prints_what_the_page_shows(
    page: str, peer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(shutil.copytree(peer_files, tmp_path / "copy"))
    steps = steps_of((ROOT / page).read_text())
    assert len(steps) > 3
    for command, expected in steps:
        program, *arguments = shlex.split(command)
        assert program == "fsdp-flat"
        _, output, errors = run(*arguments)
        assert output + errors == expected, command
