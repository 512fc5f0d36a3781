"""Says above a block of Python which earlier blocks it continues: those that define the names that it uses."""

from __future__ import annotations

import builtins
import dis
import posixpath
import re
import textwrap
from collections.abc import Iterator
from types import CodeType

from markdown.extensions.toc import slugify

# The page whose first block has the imports and the model of the other pages, and its heading there.
FIRST_PAGE, FIRST_HEADING = "getting_started.md", "the-model"
# Pages whose blocks use names of an example, a test or a client's model, as the page itself says.
_OTHER_CONTEXT = (
    "migrating.md",
    "planning.md",
    "matrix_optimizers.md",
)
_PARTS = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$|^<!-- run\n(?P<hidden>.*?)^-->$|^#+ +(?P<heading>[^\n]*)$",
    re.DOTALL | re.MULTILINE,
)


def names_of(code: str) -> tuple[set[str], set[str]]:
    """Return the names that a block defines, and those that it reads before it defines them."""
    compiled = compile(code, "block", "exec")
    defined: set[str] = set()
    used: set[str] = set()
    for step in dis.get_instructions(compiled):
        if step.opname == "STORE_NAME":
            defined.add(step.argval)
        elif step.opname == "LOAD_NAME" and step.argval not in defined:
            used.add(step.argval)
    for inner in _functions_in(compiled):
        steps = list(dis.get_instructions(inner))
        stored = {
            step.argval for step in steps if step.opname == "STORE_NAME"
        }  # of a class
        used |= (
            {
                step.argval
                for step in steps
                if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"}
            }
            - defined
            - stored
        )
    return defined, used - set(vars(builtins)) - {"__name__"}


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions_in(constant)


def with_origins(markdown: str, page: str, first_page: str) -> str:
    """Return a page with a line above each block that links to the sections whose blocks it continues.

    Args:
        markdown: the page.
        page: its path below docs/.
        first_page: the text of Getting started.
    """
    origin: dict[str, str] = {}  # of a name: the link to the section that defines it
    if page not in (*_OTHER_CONTEXT, FIRST_PAGE):
        first = next(part for part in _PARTS.finditer(first_page) if part["code"])
        path = posixpath.relpath(FIRST_PAGE, posixpath.dirname(page) or ".")
        origin = dict.fromkeys(
            names_of(first["code"])[0], f"[Getting started]({path}#{FIRST_HEADING})"
        )
    current = ""

    def marked(part: re.Match[str]) -> str:
        nonlocal current
        if part["heading"] is not None:
            title = part["heading"].strip()
            current = f"[{title}](#{slugify(title.replace('`', ''), '-')})"
            return part[0]
        defined, used = names_of(textwrap.dedent(part["code"] or part["hidden"]))
        links = dict.fromkeys(origin[name] for name in sorted(used) if name in origin)
        links.pop(current, None)
        origin.update(dict.fromkeys(defined, current))
        if part["hidden"] is not None or not links:
            return part[0]
        line = f"Continues from {' and '.join(links)}.\n{{: .continues }}\n"
        return textwrap.indent(line, part["indent"]) + "\n" + part[0]

    return _PARTS.sub(marked, markdown)
