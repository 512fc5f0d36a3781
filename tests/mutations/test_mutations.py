"""Mutants are programs that differ from their file in one place, and a seed draws the same ones again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.mutations.executed import lines_of, marked
from tests.mutations.mutants import mutants_of

SOURCE = b'''"""Text == 1."""

def f(a: "int | 3", b=True):
    """Says 1 + 1."""
    if not a and (b) or a < 2:
        g(a)
    return a + 1, [x for x in b if x is not None], f"{a == 1}"
'''


def test_each_kind_of_change_is_made_and_texts_and_annotations_stay() -> None:
    changes = [each.describe(SOURCE).partition(": ")[2] for each in mutants_of(Path("a.py"), SOURCE)]
    assert changes == [
        "'True' -> 'False'",
        "'not a' -> 'bool(a)'",
        "'and' -> 'or'",
        "'or' -> 'and'",
        "'<' -> '<='",
        "'2' -> '3'",
        "'g(a)' -> 'pass'",
        "'+' -> '-'",
        "'1' -> '2'",
        "'is not' -> 'is'",
    ]


LINES = b'''"""Text."""
FIRST = 1

class A:
    field: int = 2

    def method(self, given=True):
        """Says what."""
        if given and (
            FIRST
        ):
            return 1
        else:
            return self.field

def f():
    return 2
'''


def test_each_statement_in_a_function_notes_its_line_and_what_is_outside_has_those_of_its_class_or_file() -> None:
    noted = bytearray(100)
    names: dict[str, Any] = {"__executed__": noted}
    exec(compile(marked(LINES, 50), "a.py", "exec"), names)
    assert not any(noted)
    assert names["A"]().method() == 1
    assert [number for number, value in enumerate(noted) if value] == [59, 62]
    assert names["A"].method.__doc__ == "Says what."
    assert {line: lines_of(LINES, line) for line in (9, 10, 12, 17)} == {9: [9], 10: [9], 12: [12], 17: [17]}
    assert set(lines_of(LINES, 5)) == {8, 9, 12, 14}
    assert set(lines_of(LINES, 2)) == {8, 9, 12, 14, 17}
