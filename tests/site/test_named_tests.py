"""Tests that docs/pains.md and the selection for other versions of torch name are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.site.pages import DOCS
from tests.versions.selection import FULL, SHORT

TESTS = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"`([\w/]+\.py::\w+)`", (DOCS / "pains.md").read_text())


@cache
def functions_of(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("names", [NAMED, [name.removeprefix("tests/") for name in FULL]], ids=["pains", "versions"])
def test_every_named_test_exists(names: list[str]) -> None:
    assert len(names) > 30
    missing = [name for name in names if name.partition("::")[2] not in functions_of(TESTS / name.partition("::")[0])]
    assert missing == []
    assert set(SHORT) < set(FULL)
