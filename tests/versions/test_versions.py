"""The oldest torch is named alike everywhere and checked at import; the selection and its runner."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_flat.torch_version import OLDEST, check_torch
from tests.versions import __main__ as runner

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
