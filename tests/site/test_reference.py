"""Public names are in the API reference and in code that runs, pages in the navigation; named tests are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import fsdp_flat
from fsdp_flat import errors
from tests.site.pages import DOCS, PAGES, ROOT, blocks_of, names_in
from tests.versions.selection import FULL, SHORT

NAVIGATION = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
ENTRIES = {
    page: re.findall(r"^::: fsdp_flat\.(\S+)$", (DOCS / page).read_text(), re.MULTILINE)
    for page in PAGES
    if page.startswith("reference/")
}
ALL_ENTRIES = [entry for entries in ENTRIES.values() for entry in entries]
MODULES = ("wrap", "api", "composable", "collectives", "sharded_grad_scaler", "compat")


def public_names() -> dict[str, object]:
    """Return every public object under the path by which users know it."""
    found = {name: getattr(fsdp_flat, name) for name in fsdp_flat.__all__}
    known = {id(value) for value in found.values()}
    for path in MODULES:
        module = import_module(f"fsdp_flat.{path}")
        found |= {f"{path}.{n}": vars(module)[n] for n in module.__all__ if id(vars(module)[n]) not in known}
    for name, value in vars(errors).items():
        if isinstance(value, type) and id(value) not in known:
            found[f"errors.{name}"] = value
    return found


def used_names() -> dict[str, set[str]]:
    """Return the names that the running code of each page uses."""
    return {
        page: set().union(*(names_in(block.code) for block in blocks_of(page) if not block.reason)) for page in PAGES
    }


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(NAVIGATION) == sorted([*PAGES, "index.md"])  # docs/_site/hooks.py makes that of README


def test_every_public_name_has_one_entry_in_the_reference() -> None:
    assert sorted(ALL_ENTRIES) == sorted(public_names())


def test_every_public_name_is_used_in_code_of_the_pages_that_runs() -> None:
    used = set().union(*used_names().values())
    assert [name for name in public_names() if name.rpartition(".")[2] not in used] == []


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
