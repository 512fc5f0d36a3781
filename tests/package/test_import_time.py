"""`import fsdp_flat` costs next to nothing beside `import torch`: public names are imported when they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fsdp_flat


def in_a_new_process(program: str) -> str:
    """Return what a program prints; raise if it fails."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_loads_no_module_of_torch_and_of_the_package_only_the_versions() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import fsdp_flat
new = set(sys.modules) - before
print(*sorted(name for name in new if name.startswith(("fsdp_flat", "torch", "numpy", "sympy"))))
"""
    assert in_a_new_process(program).split() == ["fsdp_flat", "fsdp_flat.torch_version", "fsdp_flat.version"]


def test_the_wrapper_class_does_not_load_the_checkpoint_package() -> None:
    program = "import sys\nfrom fsdp_flat import FullyShardedDataParallel\nprint('fsdp_flat.checkpoint' in sys.modules)"
    assert in_a_new_process(program) == "False"


def test_each_public_name_is_the_object_that_type_checkers_see() -> None:
    tree = ast.parse(Path(fsdp_flat.__file__).read_text())
    imports = [node for block in tree.body if isinstance(block, ast.If) for node in ast.walk(block)]
    seen = {
        alias.name: node.module
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    assert sorted(seen) == fsdp_flat.__all__
    for name, module in seen.items():
        assert getattr(fsdp_flat, name) is getattr(import_module(module), name), name


@pytest.mark.from_size("cover", "starts several programs that import torch")
def test_a_star_import_and_dir_give_all_public_names() -> None:
    assert in_a_new_process("import fsdp_flat as f\nprint(set(f.__all__) <= set(dir(f)))") == "True"
    program = "from fsdp_flat import *\nimport fsdp_flat\nprint(set(fsdp_flat.__all__) <= set(globals()))"
    assert in_a_new_process(program) == "True"


def test_a_submodule_is_an_attribute_without_an_import_of_its_own() -> None:
    assert in_a_new_process("import fsdp_flat\nprint(fsdp_flat.wrap.ModuleWrapPolicy.__name__)") == "ModuleWrapPolicy"


@pytest.mark.parametrize("name", ["FullyShardedDataParalel", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error_with_the_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'fsdp_flat' has no attribute '{name}'"):
        getattr(fsdp_flat, name)
