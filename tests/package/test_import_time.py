"""`import fsdp_flat` costs next to nothing beside `import torch`: public names are imported when they are used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fsdp_flat

# Each line says what its import has loaded beside what those before it have.
PROGRAM = """
import json, sys, torch
def new(before): return sorted(set(sys.modules) - before)
before = set(sys.modules)
import fsdp_flat
print(json.dumps(new(before)))
print(json.dumps(fsdp_flat.wrap.ModuleWrapPolicy.__name__))
from fsdp_flat import FullyShardedDataParallel
print(json.dumps(new(before)))
from fsdp_flat import *  # each is imported when it is first used
print(json.dumps(new(before)))
"""


def in_a_new_process(program: str) -> str:
    """Return what a program prints; raise if it fails."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def loaded() -> list[Any]:
    """What the program prints."""
    return [json.loads(line) for line in in_a_new_process(PROGRAM).splitlines()]


def test_the_import_loads_no_module_of_torch_and_of_the_package_only_the_versions(loaded: list[Any]) -> None:
    names = [name for name in loaded[0] if name.startswith(("fsdp_flat", "torch", "numpy", "sympy"))]
    assert names == ["fsdp_flat", "fsdp_flat.torch_version", "fsdp_flat.version"]


def test_the_wrapper_class_does_not_load_the_checkpoint_package(loaded: list[Any]) -> None:
    assert "fsdp_flat.fully_sharded_data_parallel" in loaded[2]
    assert "fsdp_flat.checkpoint" not in loaded[2]


@pytest.mark.parametrize("module", ["torch._dynamo", "torch.distributed.fsdp"])
def test_importing_all_names_leaves_a_module_alone(module: str, loaded: list[Any]) -> None:
    assert "fsdp_flat.core.unit" in loaded[3]
    assert module not in loaded[3]


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


def test_a_submodule_is_an_attribute_without_an_import_of_its_own(loaded: list[Any]) -> None:
    assert loaded[1] == "ModuleWrapPolicy"


@pytest.mark.parametrize("name", ["FullyShardedDataParalel", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error_with_the_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'fsdp_flat' has no attribute '{name}'"):
        getattr(fsdp_flat, name)
