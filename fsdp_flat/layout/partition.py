"""Who has which elements of a tensor, as a rule rather than a list of ranks.

A checkpoint of a thousand ranks asks it for every parameter, and only few ranks have to do with any one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdp_flat.layout.interval import Interval

__all__ = ["EvenPartition", "IrregularPartition", "Partition", "ReplicatedPartition"]


class Partition(Protocol):
    """Which elements of one flattened tensor each rank of a group has, or is to have."""

    def __getitem__(self, rank: int) -> Interval:
        """The elements of one rank."""
        ...

    def ranks(self, run: Interval) -> Sequence[int]:
        """Ranks that may have some of these elements, in order; no other has any."""
        ...

    def __hash__(self) -> int:
        """A spread is a value: equal ones make equal plans."""
        ...


@dataclass(frozen=True, slots=True)
class EvenPartition:
    """A tensor cut at equal steps, rank after rank: local shards of a flat buffer, or dim-0 chunks.

    Attributes:
        numel: elements of the tensor.
        step: elements from one cut to the next.
        offset: elements of what is cut that lie before the tensor.
        size: number of ranks.
    """

    numel: int
    step: int
    offset: int
    size: int

    def __getitem__(self, rank: int) -> Interval:
        """The elements of one rank; what is empty lies at the end of the tensor that is nearest."""
        start = rank * self.step - self.offset
        return Interval(min(max(start, 0), self.numel), min(max(start + self.step, 0), self.numel))

    def ranks(self, run: Interval) -> range:
        if run.is_empty:
            return range(0)
        last = (run.stop - 1 + self.offset) // self.step
        return range((run.start + self.offset) // self.step, min(last + 1, self.size))


@dataclass(frozen=True, slots=True)
class ReplicatedPartition:
    """All of a tensor, on one rank or on every one.

    Attributes:
        numel: elements of the tensor.
        rank: the one rank that has it; None if all have.
        size: number of ranks.
    """

    numel: int
    rank: int | None
    size: int

    def __getitem__(self, rank: int) -> Interval:
        return Interval(0, self.numel if self.rank in (None, rank) else 0)

    def ranks(self, run: Interval) -> Sequence[int]:
        return range(self.size) if self.rank is None else (self.rank,)


@dataclass(frozen=True, slots=True)
class IrregularPartition:
    """What follows no rule: one run a rank.

    Attributes:
        runs: by rank.
    """

    runs: tuple[Interval, ...]

    def __getitem__(self, rank: int) -> Interval:
        return self.runs[rank]

    def ranks(self, run: Interval) -> Sequence[int]:
        return range(len(self.runs))
