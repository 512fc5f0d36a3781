"""Docstrings of the package: a first line with a verb, and arguments that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

Documented = ast.FunctionDef | ast.ClassDef
# A first line that begins with one of these is a clause, not a statement of the purpose.
CLAUSES = re.compile(r"(What|Who|Whose|Which|How|Where|When|Whether|That)\b")


def documented(source: str) -> Iterator[tuple[Documented, str]]:
    """Yield every class and function with its docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield node, text


def names_in(section: str, text: str) -> list[str]:
    """Return the names in a section of a docstring, ``Args:`` or ``Attributes:``."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith(" ") and line.strip():
            inside = line.strip() == section
        elif inside and (match := re.match(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", line)):
            found += [name.lstrip("*") for name in match[1].split(", ")]
    return found


def arguments(node: Documented) -> set[str]:
    """Return the names of the parameters of a function, or of a class's constructor and fields."""
    if isinstance(node, ast.ClassDef):
        found = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and hasattr(item.target, "id")}
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__", "of"):
                found |= arguments(item)
        return found
    args = node.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    return {arg.arg for arg in named}


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names of fields, slots, members and everything that is assigned to ``self`` or is a method."""
    found = arguments(node)
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name):
            found.add(item.attr)
        elif isinstance(item, ast.FunctionDef):
            found.add(item.name)
        elif isinstance(item, ast.Assign):
            found.update(target.id for target in item.targets if isinstance(target, ast.Name))
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            found.add(item.value)
    return found


def problems(source: str) -> list[str]:
    """Return the mistakes in the docstrings of a file, one line each."""
    found = []
    for node, text in documented(source):
        if CLAUSES.match(text):
            found.append(f"{node.name}: the first line is a clause: {text.splitlines()[0]}")
        unknown = [name for name in names_in("Args:", text) if name not in arguments(node)]
        # A protocol or a subclass may take its constructor from a base; then none of the names is known.
        if unknown and not (isinstance(node, ast.ClassDef) and not arguments(node)):
            found.append(f"{node.name}: documents arguments that it does not take: {', '.join(unknown)}")
        if isinstance(node, ast.ClassDef):
            missing = [name for name in names_in("Attributes:", text) if name not in attributes(node)]
            if missing:
                found.append(f"{node.name}: documents attributes that it does not have: {', '.join(missing)}")
    return found


def test_docstrings_begin_with_a_verb_and_name_the_arguments_that_there_are() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in sorted((ROOT / "fsdp_flat").rglob("*.py"))
        for problem in problems(path.read_text())
    ]
    assert not found, "\n".join(found)
