"""Mutants are programs that differ from their file in one place, and a seed draws the same ones again."""

from __future__ import annotations

from pathlib import Path

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
