"""Sessions that share a queue of files: each file runs once, and what is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import ROOT, files_of

PASSING = "def test_that_passes() -> None:\n    assert True\n"
FAILING = "def test_that_fails() -> None:\n    assert 1 == 2\n"


@pytest.mark.from_size("all", "starts the sessions of a run of its own; each run of the suite starts some")
def test_each_file_runs_once_and_failures_come_between_the_line_of_progress_and_the_closing_lines(
    tmp_path: Path,
) -> None:
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(FAILING if number == 3 else PASSING)
    (tmp_path / "test_broken.py").write_text("raise ValueError('cannot be imported')\n")
    command = [sys.executable, "-m", "tests", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    progress, *middle = done.stdout.splitlines()
    middle, closing = middle[:-3], middle[-3:]
    assert done.returncode == 1
    assert progress.startswith("7 files in 3 sessions: ")
    marks = progress.removeprefix("7 files in 3 sessions: ").partition(" ")[0]
    assert sorted(marks) == sorted(".....FF")
    counts = [int(number) for line in closing for number in re.findall(r"(\d+) passed", line)]
    assert sum(counts) == 5, closing
    text = "\n".join(middle)
    assert "assert 1 == 2" in text
    assert "cannot be imported" in text
    assert "passed" not in text


def test_files_are_those_of_folders() -> None:
    files = files_of(["tests/support", "tests/comm"], ["tests/comm/test_faults.py"])
    assert len(set(files)) == len(files)
    assert Path("tests/comm/test_faults.py") not in files
    assert Path("tests/support/test_session.py") in files
