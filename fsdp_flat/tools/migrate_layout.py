"""Splits one ``from`` import into several, keeping every comment beside its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst

# Whitespace and comments between two names: after a comma, after the opening bracket, before the closing one.
Gap = cst.BaseParenthesizableWhitespace


def split_import_from(node: cst.ImportFrom, groups: Mapping[str | None, Sequence[int]]) -> list[cst.ImportFrom]:
    """Split an import into one per group of names, keeping brackets, line breaks and comments.

    Args:
        node: the import, not of ``*``.
        groups: for each module (None for the current one) the indices of its names, in order.
    """
    assert not isinstance(node.names, cst.ImportStar)
    parts = []
    for module, indices in groups.items():
        part = node if len(indices) == len(node.names) else _only(node, indices)
        if module is not None:
            part = part.with_changes(module=dotted(module))
        parts.append(part)
    if len(parts) > 1:
        parts = [part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for part in parts[:-1]] + parts[-1:]
    return parts


def _only(node: cst.ImportFrom, indices: Sequence[int]) -> cst.ImportFrom:
    """Return the import with only the names at ``indices``."""
    names = node.names
    assert not isinstance(names, cst.ImportStar)
    gaps = _gaps(node)
    kept: list[cst.ImportAlias] = []
    for index, following in zip(indices, [*indices[1:], len(names)]):
        gap = _joined(gaps[index + 1], gaps[following])
        kept.append(names[index].with_changes(comma=cst.Comma(whitespace_after=gap)))
    if indices[-1] + 1 < len(names) and isinstance(gap, cst.ParenthesizedWhitespace):
        # Comments before the closing bracket stay with the last name.
        gap = gap.with_changes(empty_lines=())
    ends_with_comma = isinstance(names[-1].comma, cst.Comma)
    comma = cst.Comma(whitespace_after=gap) if ends_with_comma else cst.MaybeSentinel.DEFAULT
    kept[-1] = kept[-1].with_changes(comma=comma)
    if node.lpar is None or node.rpar is None:
        return node.with_changes(names=kept)
    opening = _joined(gaps[0], gaps[indices[0]])
    closing = node.rpar if ends_with_comma else node.rpar.with_changes(whitespace_before=gap)
    return node.with_changes(names=kept, lpar=node.lpar.with_changes(whitespace_after=opening), rpar=closing)


def _gaps(node: cst.ImportFrom) -> list[Gap]:
    """Return the gaps before each name and after the last one."""
    names = node.names
    assert not isinstance(names, cst.ImportStar)
    nothing = cst.SimpleWhitespace("")
    after = [alias.comma.whitespace_after if isinstance(alias.comma, cst.Comma) else nothing for alias in names]
    if node.lpar is None or node.rpar is None:
        return [nothing, *after]
    if not isinstance(names[-1].comma, cst.Comma):
        after[-1] = node.rpar.whitespace_before
    return [node.lpar.whitespace_after, *after]


def _joined(after: Gap, before: Gap) -> Gap:
    """Join the gap after one name and the gap before another, which may be the same one."""
    if isinstance(before, cst.ParenthesizedWhitespace):
        line = after.first_line if isinstance(after, cst.ParenthesizedWhitespace) else cst.TrailingWhitespace()
        return before.with_changes(first_line=line)
    if isinstance(after, cst.ParenthesizedWhitespace):
        return after.with_changes(empty_lines=())
    return before


def dotted(name: str) -> cst.Name | cst.Attribute:
    """Build the expression ``a.b.c`` from a dotted name."""
    module = cst.parse_expression(name)
    assert isinstance(module, (cst.Name, cst.Attribute))
    return module
