"""The oldest torch is named alike everywhere and checked at import; the selection and its runner."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_flat.torch_version import OLDEST, check_torch
from tests.versions import __main__ as runner
from tests.versions.selection import FULL, SHORT

ROOT = Path(__file__).parents[2]


def test_setup_and_readme_and_the_tested_versions_name_the_oldest_torch() -> None:
    assert f'"torch>={OLDEST}"' in (ROOT / "setup.py").read_text()
    assert f"torch ({OLDEST} or newer)" in (ROOT / "README.md").read_text()
    assert runner.VERSIONS.split(",")[0] == OLDEST


def test_an_import_with_an_older_torch_is_an_error_with_both_versions(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('__version__ = "2.7.1+cu126"\n')
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import fsdp_flat.layout"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert re.search(
        rf"ImportError: fsdp_flat needs torch {OLDEST} or newer, and this is torch 2\.7\.1\+cu126 from .*torch\.py",
        result.stderr,
    )


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0a0+5228986c39.nv25.6", "2.15.0+cu130", "3.0"])
def test_the_oldest_torch_its_prereleases_and_newer_ones_are_taken(version: str) -> None:
    check_torch(version)


def test_another_torch_comes_with_the_pinned_tools_and_its_own_setuptools() -> None:
    names = {line.partition("==")[0] for line in runner.other_constraints().splitlines()}
    assert {"pytest", "hypothesis"} <= names
    assert not {"torch", "setuptools"} & names


def test_every_selected_test_exists_once() -> None:
    assert len(set(FULL)) == len(FULL)
    assert set(SHORT) < set(FULL)
    for path, name in (test.split("::") for test in FULL):
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_a_version_that_pip_cannot_find_is_said_and_fails_unless_it_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert runner.main(["--versions", "newest"]) == 1
    assert runner.main(["--versions", "newest", "--if-possible"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"torch newest, {runner.PYTHON}: NOT TESTED: failed: ") == 2
    assert "No matching distribution found for torch" in printed


def test_the_pinned_torch_is_not_tested_again_as_the_newest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "newest_torch", runner.pinned_torch)
    assert runner.main(["--versions", "newest"]) == 0
    assert "which constraints.txt pins" in capsys.readouterr().out


@pytest.mark.parametrize("status, words", [(0, "passed"), (1, "FAILED with status 1")])
def test_the_exit_status_is_that_of_the_tests_and_the_environment_is_removed(
    status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    folder = tmp_path / f"2.99-{runner.PYTHON}"
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {status}\n")
    python.chmod(0o755)
    (folder / ".installed").touch()
    assert runner.main(["--versions", "2.99", "--short", "--remove"]) == status
    assert f"torch 2.99, {runner.PYTHON}: {words}, 2.99" in capsys.readouterr().out
    assert not folder.exists()
