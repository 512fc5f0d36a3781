"""Importing the library imports nothing that takes long, and not torch's own FSDP."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["torch._dynamo", "torch.distributed.fsdp"])
def test_importing_the_library_leaves_a_module_alone(module: str) -> None:
    # All names: each is imported when it is first used.
    script = "import sys, torch; before = {*sys.modules}; from fsdp_flat import *; print(*({*sys.modules} - before))"
    imported = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert "fsdp_flat.core.unit" in imported
    assert module not in imported
