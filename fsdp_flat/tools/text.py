"""Writes numbers and tables as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_flat.errors import OptionError

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_SIZE = re.compile(r"\s*([0-9.]+)\s*(?:([kmgtp]?)(i?)b?)?\s*", re.IGNORECASE)


def size_text(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit, as "1.23 GB"."""
    value = float(nbytes)
    for unit in _DECIMAL:
        if abs(value) < 999.5 or unit == _DECIMAL[-1]:
            return f"{value:.0f} B" if unit == "B" else f"{value:#.3g} {unit}".replace(". ", " ")
        value /= 1000
    raise AssertionError(nbytes)


def nbytes_of(size: str | float) -> int:
    """Return the bytes that a size like "80GB" (10**9 each), "80GiB" (2**30 each) or a number means.

    Raises an OptionError for another text.
    """
    if not isinstance(size, str):
        return int(size)
    found = _SIZE.fullmatch(size)
    try:
        number = float(found[1]) if found else None
    except ValueError:
        number = None
    if found is None or number is None:
        raise OptionError(f'A size is a number of bytes or a text like "80GB" or "80GiB"; got {size!r}.')
    power = "kmgtp".index(found[2].lower()) + 1 if found[2] else 0
    return int(number * (1024 if found[3] else 1000) ** power)


def aligned(rows: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    """Return the lines of a table: the first ``num_left`` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [
                *map(str.ljust, row[:num_left], widths),
                *map(str.rjust, row[num_left:], widths[num_left:]),
            ]
        ).rstrip()
        for row in rows
    ]
