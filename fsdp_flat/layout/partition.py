"""Maps ranks to the elements of a flattened tensor that they hold.

Most partitions are rules rather than lists of ranks: in a checkpoint over a thousand ranks, each parameter involves
only a few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdp_flat.layout.interval import Interval


class Partition(Protocol):
    """Maps each rank of a group to its elements of one flattened tensor."""

    def __getitem__(self, rank: int) -> Interval:
        """Return the elements of ``rank``."""
        ...

    def ranks(self, run: Interval) -> Sequence[int]:
        """Return the ranks that may hold elements of ``run``, in order; no other rank holds any."""
        ...

    def __hash__(self) -> int:
        """Hash by value: equal partitions make equal plans, which are cached."""
        ...


@dataclass(frozen=True, slots=True)
class EvenPartition:
    """Splits a tensor at equal steps in rank order: local shards of a flat buffer, or dim-0 chunks.

    Attributes:
        numel: elements of the tensor.
        step: elements per rank.
        offset: elements before the tensor in the buffer that is split.
        size: number of ranks.
    """

    numel: int
    step: int
    offset: int
    size: int

    def __getitem__(self, rank: int) -> Interval:
        """Return the elements of ``rank``; an empty interval lies at the nearest end of the tensor."""
        start = rank * self.step - self.offset
        return Interval(min(max(start, 0), self.numel), min(max(start + self.step, 0), self.numel))

    def ranks(self, run: Interval) -> range:
        if run.is_empty:
            return range(0)
        last = (run.stop - 1 + self.offset) // self.step
        return range((run.start + self.offset) // self.step, min(last + 1, self.size))


@dataclass(frozen=True, slots=True)
class ReplicatedPartition:
    """Places the full tensor on one rank or on every rank.

    Attributes:
        numel: elements of the tensor.
        rank: the only rank that holds it; None if all ranks do.
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
    """Lists an arbitrary interval for each rank.

    Attributes:
        runs: the intervals, by rank.
    """

    runs: tuple[Interval, ...]

    def __getitem__(self, rank: int) -> Interval:
        return self.runs[rank]

    def ranks(self, run: Interval) -> Sequence[int]:
        return range(len(self.runs))
