"""docs/tensor_classes.md names tests that exist, and the versions that `make test` and `make test-clients` install."""

from __future__ import annotations

import re

from tests.site.pages import DOCS, ROOT
from tests.site.test_pains_table import exists

PAGE = DOCS / "tensor_classes.md"


def rows_of(text: str) -> list[list[str]]:
    """The cells of each row of a table, without its head."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip(" |") for cell in cells] for cells in lines if cells[0].strip() != "Class"]


def test_every_row_names_versions_that_are_installed_and_tests_that_exist() -> None:
    rows = rows_of(PAGE.read_text())
    constraints = "".join((ROOT / name).read_text() for name in ("constraints.txt", "constraints-clients.txt"))
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints, re.MULTILINE))
    assert len(rows) >= 8
    for row in rows:
        assert len(row) == 6, row
        tests = re.findall(r"`([^`]*)`", row[5])
        assert tests, row
        assert [test for test in tests if not exists(test)] == []
        named = re.findall(r"(\w+) (\d+(?:\.\d+)+)", row[4])
        assert named or row[4] in ("the same", "any"), row[4]
        assert [(name, version) for name, version in named if pinned.get(name) != version] == []
