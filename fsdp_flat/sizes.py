"""Writes numbers of bytes as text, and reads them."""

from __future__ import annotations

import re

from fsdp_flat.errors import OptionError

_SIZE = re.compile(r"\s*([0-9.]+)\s*(?:([kmgtp]?)(i?)b?)?\s*", re.IGNORECASE)
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")


def scale_of(nbytes: float) -> tuple[float, str]:
    """Return the divisor and the decimal unit in which a number of bytes is written with up to three digits."""
    power = next((power for power in range(len(_DECIMAL)) if abs(nbytes) < 999.5 * 1000**power), len(_DECIMAL) - 1)
    return 1000.0**power, _DECIMAL[power]


def size_text(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit, as "1.23 GB"."""
    divisor, unit = scale_of(nbytes)
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes / divisor:#.3g} {unit}".replace(". ", " ")


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
