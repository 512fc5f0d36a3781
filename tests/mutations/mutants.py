"""Finds places of a Python file where a small change makes another program."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """Describes a change of one file.

    Attributes:
        path: the file.
        line: number of the changed line, from 1.
        start, end: offsets of the replaced text in the file, in bytes.
        new: what replaces it.
    """

    path: Path
    line: int
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        """Return the file's changed content."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """Return file, line, and the replaced and the new text, in one line."""
        return f"{self.path}:{self.line}: {source[self.start : self.end].decode()!r} -> {self.new!r}"


def mutants_of(path: Path, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, in the order of their places.

    Changed are comparisons, ``and`` and ``or``, ``not``, arithmetic, truth values, small numbers, and calls whose
    result nobody uses. Texts, annotations, errors and assertions stay.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def between(left: ast.expr, right: ast.expr, new: str) -> Mutant | None:
        """Replace the operator between two operands, without the brackets that may be around it."""
        start, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)  # type: ignore[arg-type]
        text = source[start:end]
        if b"#" in text or b"\n" in text:
            return None
        bare = text.strip(b"() ")
        start += text.index(bare)
        return Mutant(path, left.lineno, start, start + len(bare), new)

    def whole(node: ast.expr | ast.stmt, new: str) -> Mutant:
        end = at(node.end_lineno, node.end_col_offset)  # type: ignore[arg-type]
        return Mutant(path, node.lineno, at(node.lineno, node.col_offset), end, new)

    found: list[Mutant | None] = []
    for node in _executed(ast.parse(source)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for index, operator in enumerate(node.ops):
                found.append(between(operands[index], operands[index + 1], _COMPARISONS[type(operator)]))
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            found.extend(between(left, right, new) for left, right in zip(node.values, node.values[1:]))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            found.append(between(node.left, node.right, _OPERATORS[type(node.op)]))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            negated = source[at(node.lineno, node.col_offset) : whole(node, "").end].decode()
            found.append(whole(node, f"bool({negated.removeprefix('not').strip()})"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            found.append(whole(node, str(not node.value)))
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10:
            found.append(whole(node, str(node.value + 1)))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found.append(whole(node, "pass"))
    return sorted(filter(None, found), key=lambda each: (each.start, each.end))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file that say what it does, outermost first."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                yield child
                yield from _executed(child)


def drawn(root: Path, folders: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants at random from all files below some folders of ``root``; a seed draws the same ones again."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    every = [each for file in files for each in mutants_of(file.relative_to(root), file.read_bytes())]
    return random.Random(seed).sample(every, count)
