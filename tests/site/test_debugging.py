"""The table of docs/debugging.md quotes what the library says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fsdp_flat
from tests.site.pages import DOCS

PACKAGE = Path(fsdp_flat.__file__).parent
PAGE = (DOCS / "debugging.md").read_text()


def told_by_the_package() -> str:
    """Return all constant text of the package; what an f-string computes is left out."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        texts += [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    return "\n".join(texts)


def quoted_in(page: str) -> list[str]:
    """Return the texts in the first column of tables that the library says; those of torch are marked."""
    rows = re.findall(r"^\| `([^`]+)`([^|]*)\|", page, re.MULTILINE)
    return [text for text, rest in rows if " " in text and "torch's" not in rest]


def not_said(quotes: list[str], said: str) -> list[str]:
    """Return the quotes of which a part, between dots, is nowhere in what is said."""
    return [quote for quote in quotes if not all(part.strip() in said for part in quote.split("..."))]


def test_every_text_of_the_table_is_one_of_the_librarys() -> None:
    quotes = quoted_in(PAGE)
    assert len(quotes) > 20
    assert not_said(quotes, told_by_the_package()) == []


def test_a_text_that_the_library_does_not_say_is_found() -> None:
    page = "| `was used ... while asleep` | a |\n| `size mismatch` (torch's) | b |\n"
    assert not_said(quoted_in(page), "X was used while sharded") == ["was used ... while asleep"]
