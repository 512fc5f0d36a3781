"""Reads speeds from text, and shortens texts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdp_flat.errors import OptionError

_SPEED = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kKMGTP]?)\s*([A-Za-z/]*)\s*")
# What one of a unit is worth. "Gb" is missing: some mean bits by it, and others bytes.
BYTES_A_SECOND = {"": 1.0, "B": 1.0, "B/s": 1.0, "bit/s": 0.125, "bps": 0.125}
FLOPS = {"": 1.0, "FLOP": 1.0, "FLOPS": 1.0, "FLOP/s": 1.0, "FLOPs": 1.0}


def speed_of(name: str, text: str, units: Mapping[str, float]) -> float:
    """Return the number a second that a text like "50GB/s" or "4e14" means.

    Args:
        name: what the number is, for errors.
        text: the number, a prefix (k, M, G, T, P) or none, and a unit or none.
        units: by unit what one of it is worth.

    Raises:
        OptionError: the text is another one, or the number is not positive.
    """
    found = _SPEED.fullmatch(text)
    try:
        number = float(found[1]) if found and found[3] in units else 0.0
    except ValueError:
        number = 0.0
    if not found or not number > 0:
        known = ", ".join(unit for unit in units if unit)
        raise OptionError(
            f"{name} is a positive number a second, with k, M, G, T or P and a unit ({known}) or without; got {text!r}."
        )
    return number * 1000.0 ** " KMGTP".index(found[2].upper() or " ") * units[found[3]]


def words_of(error: BaseException) -> str:
    """Return the class and the text of an error, in one line without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(text: str) -> str:
    """Return a text of at most 100 characters, which ends in dots if it was longer."""
    return text if len(text) <= 100 else f"{text[:97]}..."
