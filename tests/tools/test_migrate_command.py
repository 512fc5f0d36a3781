"""The command line: the patch, the report, what is written, and the exit status."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="the migration tool needs it")

from fsdp_flat.migrate import main

BEFORE = "import os\nfrom torch.distributed.fsdp import CPUOffload\n\noffload = CPUOffload(True)\n"
AFTER = BEFORE.replace("torch.distributed.fsdp", "fsdp_flat")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a codebase, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(BEFORE)
    (tmp_path / "package" / "other.py").write_text("import torch\n")
    return tmp_path


def test_by_default_a_patch_is_printed_and_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["package"]) == 1
    output = capsys.readouterr()
    assert output.out == (
        "--- a/package/train.py\n+++ b/package/train.py\n@@ -1,4 +1,4 @@\n import os\n"
        "-from torch.distributed.fsdp import CPUOffload\n+from fsdp_flat import CPUOffload\n"
        " \n offload = CPUOffload(True)\n"
    )
    assert output.err == (
        "package/train.py:2: changed: CPUOffload: from fsdp_flat instead of torch.distributed.fsdp\n"
        "1 of 2 files to change, 0 findings to check\n"
        "Imports are all that changes. docs/migrating.md shows how to move a model from the wrapper to fully_shard.\n"
    )
    assert (folder / "package" / "train.py").read_text() == BEFORE


def test_write_changes_the_files_and_then_nothing_is_left_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "package" / "train.py"
    script.chmod(0o750)
    assert main(["--write", "package"]) == 0
    assert script.read_text() == AFTER
    assert script.stat().st_mode & 0o777 == 0o750
    output = capsys.readouterr()
    assert output.out == ""
    assert "package/train.py:2: changed: " in output.err
    assert main(["package"]) == 0
    assert capsys.readouterr().out == ""


def test_the_patch_applies_to_files_of_any_line_ends_and_encoding(
    folder: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    odd = "# -*- coding: latin-1 -*-\r\nname = 'é'\r\nfrom torch.distributed.fsdp import CPUOffload".encode("latin-1")
    (folder / "package" / "odd.py").write_bytes(odd)
    assert main(["package"]) == 1
    (folder / "fsdp.patch").write_bytes(capfdbinary.readouterr().out)
    git = shutil.which("git")
    assert git is not None
    subprocess.run([git, "apply", "fsdp.patch"], cwd=folder, check=True)
    assert (folder / "package" / "odd.py").read_bytes() == odd.replace(b"torch.distributed.fsdp", b"fsdp_flat")
    assert (folder / "package" / "train.py").read_text() == AFTER


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.py", "from torch.distributed.fsdp import *\n", "a.py:1: check: "),
        ("a.py", "import torch.distributed.fsdp as\n", "a.py:1: error: libcst cannot parse it"),
        ("a.ipynb", '{"source": ["import torch.distributed.fsdp"]}', "a.ipynb:1: check: notebooks are not rewritten"),
    ],
)
@pytest.mark.parametrize("mode", ["--diff", "--write"])
def test_what_is_left_to_a_person_gives_status_2_and_the_rest_is_done(
    name: str, text: str, told: str, mode: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(text)
    assert main([mode, "."]) == 2
    assert told in capsys.readouterr().err
    assert (folder / name).read_text() == text
    assert (folder / "package" / "train.py").read_text() == (AFTER if mode == "--write" else BEFORE)


def test_a_path_that_is_not_there_gives_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere", "package/other.py"]) == 2
    assert "nowhere: error: there is no such file or folder" in capsys.readouterr().err


def test_folders_that_hold_other_peoples_code_are_not_looked_into(folder: Path) -> None:
    for name in (".venv", "build", "site-packages", "__pycache__"):
        (folder / name).mkdir()
        (folder / name / "code.py").write_text(BEFORE)
    assert main(["--write", "."]) == 0
    assert (folder / "build" / "code.py").read_text() == BEFORE
    assert main(["--write", "build/code.py"]) == 0  # named by itself, a file is taken
    assert (folder / "build" / "code.py").read_text() == AFTER


def test_without_libcst_the_error_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "libcst" or name.startswith("fsdp_flat.tools.migrate_"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["package"]) == 2
    assert "pip install libcst" in capsys.readouterr().err


def test_python_m_ends_with_the_exit_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "package"])
    monkeypatch.delitem(sys.modules, "fsdp_flat.migrate")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("fsdp_flat.migrate", run_name="__main__")
    assert caught.value.code == 1
    assert capsys.readouterr().out.startswith("--- a/package/train.py")


def test_a_wrong_command_line_is_one_line_that_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "python -m fsdp_flat.migrate: the following arguments are required: PATH; "
        "see python -m fsdp_flat.migrate --help\n"
    )
