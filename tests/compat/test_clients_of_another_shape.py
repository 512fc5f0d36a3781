"""A client whose checks are not where fsdp_flat looks for them is used as it is, and a warning says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = """\
import sys, warnings
import fsdp_flat
fsdp_flat.install()
assert "accelerate" not in sys.modules
import accelerate.state
from accelerate.state import PartialState
print("made", PartialState().made)
fsdp_flat.uninstall()
"""


def output_with(state: str, folder: Path) -> str:
    """Run a script that imports a package named accelerate, whose module ``state`` is given."""
    package = folder / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "state.py").write_text(state)
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, folder / "script.py"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_client_without_the_expected_names_is_left_alone_with_a_warning(tmp_path: Path) -> None:
    assert not torch.accelerator.is_available()
    output = output_with("class PartialState:\n    made = 3\n", tmp_path)
    assert "made 3" in output
    assert "fsdp_flat cannot lift the checks by which accelerate" in output
    assert "DistributedType" in output
