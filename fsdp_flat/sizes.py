"""Writes numbers of bytes as text, and reads them."""

from __future__ import annotations

import math
import re

from fsdp_flat.errors import OptionError

# "Gb" would be gigabits.
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*((?:[kKMGTP]i?)?B|(?:[kmgtp]i?)?b)")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")


def scale_of(nbytes: float) -> tuple[float, str]:
    """Return the divisor and the decimal unit in which a number of bytes is written with up to three digits."""
    power = next((power for power in range(len(_DECIMAL)) if abs(nbytes) < 999.5 * 1000**power), len(_DECIMAL) - 1)
    return 1000.0**power, _DECIMAL[power]


def size_text(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit, as "1.23 GB"."""
    divisor, unit = scale_of(nbytes)
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes / divisor:#.3g} {unit}".replace(". ", " ")


def nbytes_of(size: str | float, argument: str = "A size") -> int:
    """Return the bytes that a size like "80GB" (10**9 each), "80GiB" (2**30 each) or a number means.

    Raises an OptionError that begins with ``argument`` for a negative number, and for a text without a unit of bytes.
    """
    if isinstance(size, str):
        found = _SIZE.fullmatch(size.strip())
        if found is not None:
            unit = found[2].lower()
            return int(float(found[1]) * (1024 if "i" in unit else 1000) ** ("bkmgtp".index(unit[0])))
    elif 0 <= size < math.inf:
        return int(size)
    raise OptionError(
        f'{argument} must be a number of bytes with a unit, as "80GB" (10**9 bytes each) or "80GiB" (2**30), with a '
        f"point for decimals; got {size!r}."
    )
