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
    last = indices[-1]
    ends_with_comma = isinstance(names[-1].comma, cst.Comma)
    kept: list[cst.ImportAlias] = []
    for index, following in zip(indices, [*indices[1:], len(names)]):
        gap = _joined(gaps[index + 1], gaps[following], is_adjacent=following == index + 1)
        comma: cst.Comma | cst.MaybeSentinel = cst.Comma(whitespace_after=gap)
        if index == last:
            ending = gap if following == index + 1 else _without_lines(gap)
            comma = cst.Comma(whitespace_after=ending) if ends_with_comma else cst.MaybeSentinel.DEFAULT
        kept.append(names[index].with_changes(comma=comma))
    if node.lpar is None or node.rpar is None:
        return node.with_changes(names=kept)
    opening = _joined(gaps[0], gaps[indices[0]], is_adjacent=indices[0] == 0)
    closing = node.rpar if ends_with_comma else node.rpar.with_changes(whitespace_before=ending)
    return node.with_changes(names=kept, lpar=node.lpar.with_changes(whitespace_after=opening), rpar=closing)


def _gaps(node: cst.ImportFrom) -> list[Gap]:
    """Return the gaps before each name and after the last one."""
    names = node.names
    assert not isinstance(names, cst.ImportStar)
    nothing = cst.SimpleWhitespace("")
    gaps: list[Gap] = [node.lpar.whitespace_after if node.lpar is not None else nothing]
    for alias in names[:-1]:
        assert isinstance(alias.comma, cst.Comma)
        gaps.append(alias.comma.whitespace_after)
    end = names[-1].comma
    if isinstance(end, cst.Comma):
        gaps.append(end.whitespace_after)
    else:
        gaps.append(node.rpar.whitespace_before if node.rpar is not None else nothing)
    return gaps


def _joined(after: Gap, before: Gap, *, is_adjacent: bool) -> Gap:
    """Join the gap after one name and the gap before another that was not adjacent to it."""
    if is_adjacent:
        return before
    if isinstance(before, cst.ParenthesizedWhitespace):
        line = after.first_line if isinstance(after, cst.ParenthesizedWhitespace) else cst.TrailingWhitespace()
        return before.with_changes(first_line=line)
    if isinstance(after, cst.ParenthesizedWhitespace):
        return after.with_changes(empty_lines=())
    return before


def _without_lines(gap: Gap) -> Gap:
    """Return the gap without comments on separate lines, which stay with the last name."""
    return gap.with_changes(empty_lines=()) if isinstance(gap, cst.ParenthesizedWhitespace) else gap


def dotted(name: str) -> cst.Name | cst.Attribute:
    """Build the expression ``a.b.c`` from a dotted name."""
    module = cst.parse_expression(name)
    assert isinstance(module, (cst.Name, cst.Attribute))
    return module
