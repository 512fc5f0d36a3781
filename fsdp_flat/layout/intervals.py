"""Describes intervals of flattened tensors, and splits them: over ranks, into transfers, and into N-d boxes.

torch's sharded checkpoints hold dim-0 chunks: ``tensor.chunk(world_size)``, so rank ``r`` has the rows from
``r * ceil(rows / world_size)``. A chunk of rows is a flat interval of the row-major parameter, and so is a rank's
local shard of it. A full tensor, on every rank or on one, is an interval as well. :func:`plan_transfer` therefore
serves every state-dict type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Describes the elements ``start, start + 1, ..., stop - 1``; empty if ``start == stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, self

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    def intersect(self, other: Interval) -> Interval:
        """Return the intersection with ``other``, which lies inside ``self``: if it is empty, at the nearest end."""
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Interval:
        return Interval(self.start + by, self.stop + by)

    def to_slice(self) -> slice:
        """Return ``slice(start, stop)``, which indexes a 1-D tensor."""
        return slice(self.start, self.stop)


# -- partitions: the elements of a flattened tensor that each rank holds ------------------------------------------


class Partition(Protocol):
    """Maps each rank of a group to its elements of one flattened tensor; hashed by value, because plans are cached.

    Partitions are rules rather than lists of ranks where possible: in a checkpoint over a thousand ranks, each
    parameter involves only a few of them.
    """

    def __getitem__(self, rank: int) -> Interval:
        """Return the elements of ``rank``."""

    def ranks(self, run: Interval) -> Sequence[int]:
        """Return the ranks that may hold elements of ``run``, in order; no other rank holds any."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EvenPartition:
    """Splits a tensor at equal steps in rank order: local shards of a flat buffer, or dim-0 chunks."""

    numel: int
    step: int  # elements per rank
    offset: int  # elements before the tensor in the buffer that is split
    size: int  # number of ranks

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
    """Places the full tensor on one ``rank``, or on all of ``size`` ranks (None)."""

    numel: int
    rank: int | None
    size: int

    def __getitem__(self, rank: int) -> Interval:
        return Interval(0, self.numel if self.rank in (None, rank) else 0)

    def ranks(self, run: Interval) -> Sequence[int]:
        return range(self.size) if self.rank is None else (self.rank,)


@dataclass(frozen=True, slots=True)
class IrregularPartition:
    """Lists an arbitrary interval for each rank."""

    runs: tuple[Interval, ...]

    def __getitem__(self, rank: int) -> Interval:
        return self.runs[rank]

    def ranks(self, run: Interval) -> Sequence[int]:
        return range(len(self.runs))


def chunk_partition(shape: tuple[int, ...], world_size: int) -> EvenPartition:
    """Return the partition of the flattened parameter into dim-0 chunks."""
    rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    return EvenPartition(rows * width, math.ceil(rows / world_size) * width, 0, world_size)


def chunk_rows(rows: int, world_size: int, rank: int) -> Interval:
    """Return a rank's rows of ``rows`` rows, by torch.chunk's rule; empty and at the end if none are left."""
    return chunk_partition((rows,), world_size)[rank]


def chunk_shape(shape: tuple[int, ...], world_size: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's dim-0 chunk; () for a scalar on rank 0."""
    if not shape:
        return (0,) if chunk_rows(1, world_size, rank).is_empty else ()
    return (chunk_rows(shape[0], world_size, rank).numel, *shape[1:])


# -- transfers from one partition to another ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Lists the elements of one tensor that one rank sends, receives and keeps.

    Attributes:
        sends: (destination rank, slice of this rank's source interval), by rank.
        receives: (source rank, slice of this rank's target interval), by rank.
        kept: slices of both intervals for the elements that stay on this rank; None if none do.
    """

    sends: tuple[tuple[int, slice], ...]
    receives: tuple[tuple[int, slice], ...]
    kept: tuple[slice, slice] | None


@lru_cache(maxsize=1 << 14)
def plan_transfer(held: Partition, wanted: Partition, rank: int) -> TransferPlan:
    """Plan the part of ``rank`` in transferring a flattened tensor from one partition to another.

    No element may be ``held`` by two ranks. Results are cached, because a training run needs the same plans for every
    checkpoint.
    """
    own, target = held[rank], wanted[rank]
    both = own.intersect(target)
    kept = None
    if not both.is_empty:
        kept = (both.shift(-own.start).to_slice(), both.shift(-target.start).to_slice())
    return TransferPlan(_shared(own, wanted, rank), _shared(target, held, rank), kept)


def _shared(run: Interval, partition: Partition, rank: int) -> tuple[tuple[int, slice], ...]:
    """Return (other rank, slice of ``run`` that it holds) for all ranks but ``rank``."""
    if run.is_empty:
        return ()
    parts = ((other, run.intersect(partition[other])) for other in partition.ranks(run) if other != rank)
    return tuple((other, part.shift(-run.start).to_slice()) for other, part in parts if not part.is_empty)


# -- boxes: the N-d chunks that a checkpoint can store ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Box:
    """Describes an N-d block of a tensor that covers the ``interval`` of the flattened (row-major) tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    interval: Interval

    def within(self, start: Sequence[int]) -> Box:
        """Return this box with its offsets, not its interval, in a larger tensor that has this one at ``start``."""
        return replace(self, offsets=tuple(map(add, self.offsets, start)))


@lru_cache(maxsize=1 << 14)
def boxes(shape: tuple[int, ...], interval: Interval) -> tuple[Box, ...]:
    """Split a flat interval of a row-major tensor into at most ``max(1, 2 * ndim - 1)`` boxes.

    Results are cached, because a training run needs the same boxes for every checkpoint.

    From the current position, the next box runs along the outermost dim of which complete indices begin there and fit,
    and covers the dims inside it completely. A box that ends at the end of a dim is followed by one along an outer dim,
    for as long as one fits; from then on each box is followed by one along an inner dim. Each dim is thus used at most
    twice, and dim 0 at most once, since its end is the tensor's end: hence the bound.

    Boxes are in flat order; their intervals are adjacent and cover ``interval``. A scalar is ``Box((), (), interval)``.
    """
    assert interval.stop <= math.prod(shape), (shape, interval)
    if interval.is_empty:
        return ()
    if not shape:
        return (Box((), (), interval),)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[Box] = []
    position = interval.start
    while position < interval.stop:
        left = interval.stop - position
        dim = next(d for d, stride in enumerate(strides) if position % stride == 0 and stride <= left)
        index = [position // stride % size for stride, size in zip(strides, shape, strict=True)]
        count = min(left // strides[dim], shape[dim] - index[dim])
        covered = Interval(position, position + count * strides[dim])
        found.append(Box(tuple(index), (1,) * dim + (count,) + shape[dim + 1 :], covered))
        position = covered.stop
    return tuple(found)
