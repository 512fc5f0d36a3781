"""Writes numbers of bytes as text."""

from __future__ import annotations

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")


def scale_of(nbytes: float) -> tuple[float, str]:
    """Return the divisor and the decimal unit in which a number of bytes is written with up to three digits."""
    power = next((power for power in range(len(_DECIMAL)) if abs(nbytes) < 999.5 * 1000**power), len(_DECIMAL) - 1)
    return 1000.0**power, _DECIMAL[power]


def size_text(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit, as "1.23 GB"."""
    divisor, unit = scale_of(nbytes)
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes / divisor:#.3g} {unit}".replace(". ", " ")
