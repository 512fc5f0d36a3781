"""Reads pages of the documentation: their blocks of Python, and the navigation of the site."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Relative to docs/, as in the navigation.
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# A fence of Python; or a comment, which the site does not show: code to run there, or why the next fence does not run.
_PARTS = re.compile(
    # A fence in a tab is indented.
    r"^(?P<indent> *)```python\n(?P<shown>.*?)^(?P=indent)```$"
    r"|^<!-- run\n(?P<hidden>.*?)^-->$|^ *<!-- not run: (?P<reason>.*?) -->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class CodeBlock:
    """A block of Python of a page.

    Attributes:
        path: the page's file.
        line: of the first line of code, from 1.
        code: its text.
        hidden: whether it prepares what the page speaks of, and the site does not show it.
        reason: why it does not run; empty if it does.
    """

    path: Path
    line: int
    code: str
    hidden: bool = False
    reason: str = ""

    def run(self, names: dict[str, Any]) -> None:
        """Run the block; the lines of a traceback are those of the page."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.path), "exec"), names)


def blocks_in(text: str, path: Path) -> Iterator[CodeBlock]:
    """Yield the blocks of Python of a page's text, in their order."""
    reason = ""
    for part in _PARTS.finditer(text):
        if part["reason"]:
            reason = part["reason"]
            continue
        kind = "shown" if part["hidden"] is None else "hidden"
        line = text.count("\n", 0, part.start(kind)) + 1
        yield CodeBlock(path, line, dedent(part[kind]), kind == "hidden", reason)
        reason = ""


def blocks_of(page: str) -> list[CodeBlock]:
    """Return the blocks of a page, named by its path below docs/."""
    path = DOCS / page
    return list(blocks_in(path.read_text(), path))


def shown_code(page: str) -> list[str]:
    """Return the Python that a page shows."""
    return [block.code for block in blocks_of(page) if not block.hidden]


def names_in(code: str) -> set[str]:
    """Return every name, attribute and imported name of some code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
    return found
