"""Which elements move between ranks when a parameter that lies in one way is to lie in another.

torch's sharded checkpoints hold dim-0 chunks: ``tensor.chunk(world_size)``, so rank ``r`` has the rows from
``r * ceil(rows / world_size)``. A chunk of rows is a flat interval of the row-major parameter, and so is a rank's
local shard of it, so what one rank sends another is an intersection of two intervals. A whole tensor on every rank, or on
one, is an interval as well: every form of checkpoint is made by :func:`plan_transfer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fsdp_flat.layout.interval import Interval
from fsdp_flat.layout.partition import EvenPartition, Partition

__all__ = ["TransferPlan", "chunk_partition", "chunk_rows", "chunk_shape", "plan_transfer"]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What one rank sends and receives of one tensor.

    Attributes:
        sends: (rank that gets it, elements of what this rank holds), by rank.
        receives: (rank that has it, elements of what this rank wants), by rank.
        kept: the same elements within what this rank holds and what it wants; None if it keeps nothing.
    """

    sends: tuple[tuple[int, slice], ...]
    receives: tuple[tuple[int, slice], ...]
    kept: tuple[slice, slice] | None


@lru_cache(maxsize=1 << 14)
def plan_transfer(held: Partition, wanted: Partition, rank: int) -> TransferPlan:
    """How rank ``rank`` takes part in bringing a tensor from where it is to where it is wanted.

    A training run asks the same of every checkpoint, so answers are kept.

    Args:
        held: the elements of the flattened tensor that each rank has; no element twice.
        wanted: the elements that each is to have.
        rank: the rank that asks.
    """
    own, target = held[rank], wanted[rank]
    both = own.intersect(target)
    kept = None
    if not both.is_empty:
        kept = (both.shift(-own.start).to_slice(), both.shift(-target.start).to_slice())
    return TransferPlan(_shared(own, wanted, rank), _shared(target, held, rank), kept)


def _shared(run: Interval, partition: Partition, rank: int) -> tuple[tuple[int, slice], ...]:
    """What other ranks than ``rank`` have of ``run``, as elements of it."""
    if run.is_empty:
        return ()
    parts = ((other, run.intersect(partition[other])) for other in partition.ranks(run) if other != rank)
    return tuple((other, part.shift(-run.start).to_slice()) for other, part in parts if not part.is_empty)


def chunk_rows(rows: int, world_size: int, rank: int) -> Interval:
    """The rows of a rank's chunk of ``rows`` rows, by torch.chunk's rule; empty at the end if none are left."""
    return chunk_partition((rows,), world_size)[rank]


def chunk_shape(shape: tuple[int, ...], world_size: int, rank: int) -> tuple[int, ...]:
    """Shape of a rank's dim-0 chunk; () for a scalar on rank 0."""
    if not shape:
        return (0,) if chunk_rows(1, world_size, rank).is_empty else ()
    return (chunk_rows(shape[0], world_size, rank).numel, *shape[1:])


def chunk_partition(shape: tuple[int, ...], world_size: int) -> EvenPartition:
    """The dim-0 chunks of all ranks as elements of the flattened parameter."""
    rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    return EvenPartition(rows * width, math.ceil(rows / world_size) * width, 0, world_size)
