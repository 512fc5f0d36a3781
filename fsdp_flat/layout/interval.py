"""Describes half-open intervals of element indices."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_flat.errors import OptionError


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Describes the elements ``start, start + 1, ..., stop - 1``; empty if ``start == stop``.

    Args:
        start: index of the first element, at least 0.
        stop: index after the last element, at least ``start``.

    Raises:
        OptionError: unless both are ints with ``0 <= start <= stop``.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not (isinstance(self.start, int) and isinstance(self.stop, int)):
            raise OptionError(f"an Interval takes two ints, got start={self.start!r}, stop={self.stop!r}")
        if not 0 <= self.start <= self.stop:
            raise OptionError(f"an Interval needs 0 <= start <= stop, got start={self.start}, stop={self.stop}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def is_empty(self) -> bool:
        """Return whether the interval has no elements."""
        return self.start == self.stop

    def intersect(self, other: Interval) -> Interval:
        """Return the intersection with ``other``.

        The result always lies inside ``self``: for disjoint intervals it is the empty interval at the end of ``self``
        that is nearest to ``other``, so it is a valid slice of the tensor that ``self`` indexes.
        """
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Interval:
        """Return this interval shifted by ``by`` elements, which may be negative.

        Raises:
            OptionError: if the result would start below 0.
        """
        return Interval(self.start + by, self.stop + by)

    def contains(self, other: Interval) -> bool:
        """Return whether ``other`` lies within this interval; shared ends are allowed."""
        return self.start <= other.start and other.stop <= self.stop

    def to_slice(self) -> slice:
        """Return ``slice(start, stop)``, which indexes a 1-D tensor."""
        return slice(self.start, self.stop)
