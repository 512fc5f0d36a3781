"""An extension of griffe, which reads the package for the API reference: it shows docstrings as Markdown."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

PUBLIC = "fsdp_flat"
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`([^`]+)`")
# A paragraph that ends in two colons, and the indented lines after it.
_LITERAL = re.compile(r"^([ ]*)(.*)::\n\n((?:\1[ ]+\S.*\n|[ ]*\n)+)", re.MULTILINE)
# Several arguments with one description.
_TOGETHER = re.compile(r"^([ ]{4})((?:\w+,\s+)+\w+): (.*(?:\n[ ]{8}.*)*)", re.MULTILINE)


def to_markdown(text: str, public: frozenset[str] = frozenset()) -> str:
    """Return a docstring with Markdown in place of reStructuredText, and a line for each argument.

    Args:
        text: the docstring, without indentation.
        public: names whose references become links.
    """

    def reference(match: re.Match[str]) -> str:
        name = match[1].removeprefix("~")
        return f"[`{name}`][{PUBLIC}.{name}]" if name in public else f"`{name}`"

    def fenced(match: re.Match[str]) -> str:
        indent, before, block = match.groups()
        code = textwrap.indent(
            f"```python\n{textwrap.dedent(block).strip()}\n```\n\n", indent
        )
        before = "For example" if before == "Example" else before
        return f"{indent}{before}:\n\n{code}" if before else code

    def apart(match: re.Match[str]) -> str:
        return "\n".join(
            f"{match[1]}{name}: {match[3]}" for name in re.split(r",\s+", match[2])
        )

    return _LITERAL.sub(
        fenced, _TOGETHER.sub(apart, _ROLE.sub(reference, text)) + "\n"
    ).rstrip()


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring when its object has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        public = frozenset(
            name for name, member in pkg.members.items() if member.is_alias
        )
        self._rewrite(pkg, public)

    def _rewrite(self, parent: griffe.Object, public: frozenset[str]) -> None:
        if parent.docstring is not None:
            parent.docstring.value = to_markdown(parent.docstring.value, public)
        for member in parent.members.values():
            if not member.is_alias:
                self._rewrite(member, public)
