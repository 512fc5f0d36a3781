"""docs/pains.md has every row, each with a status, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "pains.md"
NUM_ROWS = 44


def rows_of(text: str) -> list[list[str]]:
    """The cells of each numbered row of a table."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if is_row(line)]


def is_row(line: str) -> bool:
    return re.match(r"\| *\d", line) is not None


def problems_of(text: str) -> list[str]:
    """What is wrong with a page, one line each."""
    rows = rows_of(text)
    problems = []
    numbers = [row[0].lstrip("| ") for row in rows]
    if numbers != [str(number) for number in range(1, NUM_ROWS + 1)]:
        problems.append(f"rows are not numbered 1 to {NUM_ROWS}: {numbers}")
    for number, row in zip(numbers, rows, strict=True):
        if len(row) != 5:
            problems.append(f"row {number} has {len(row)} cells")
            continue
        named, status = re.findall(r"`([^`]*)`", row[3]), row[4].rstrip("| ")
        if status != "solved" and not re.match(r"not solved: \S", status):
            problems.append(f"row {number} has the status {status!r}")
        if status == "solved" and not named:
            problems.append(f"row {number} is solved, and no test shows it")
        problems += [f"row {number} names {test!r}, which does not exist" for test in named if not exists(test)]
    return problems


def exists(test: str) -> bool:
    """Whether ``folder/test_file.py::test_name`` is a test."""
    path, _, name = test.partition("::")
    return name.startswith("test_") and name in functions_of(TESTS / path)


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Names of the functions at the top of a file; none if there is no such file."""
    if not path.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def test_every_row_has_a_status_and_every_named_test_exists() -> None:
    assert problems_of(PAGE.read_text()) == []


def test_a_missing_row_a_wrong_status_and_a_test_that_does_not_exist_are_found() -> None:
    page = PAGE.read_text()
    lines = page.splitlines()
    third = next(index for index, line in enumerate(lines) if line.startswith("| 3 |"))
    assert "not numbered" in problems_of("\n".join(lines[:third] + lines[third + 1 :]))[0]
    assert problems_of(page.replace("| solved |", "| partly |", 1)) == ["row 1 has the status 'partly'"]
    renamed = page.replace("::test_a_tie_across_units", "::test_a_tie_over_units")
    assert len(problems_of(renamed)) == 1
    assert "does not exist" in problems_of(renamed)[0]
    untested = re.sub(r"(\| 1 \|[^|]*\|[^|]*\|)[^|]*\|", r"\1 none |", page)
    assert problems_of(untested) == ["row 1 is solved, and no test shows it"]
