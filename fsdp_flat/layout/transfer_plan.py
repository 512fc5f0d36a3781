"""Plans the transfers between ranks that turn one partition of a tensor into another.

torch's sharded checkpoints hold dim-0 chunks: ``tensor.chunk(world_size)``, so rank ``r`` has the rows from
``r * ceil(rows / world_size)``. A chunk of rows is a flat interval of the row-major parameter, and so is a rank's
local shard of it, so each rank sends the intersection of two intervals. A full tensor, on every rank or on one, is an
interval as well. :func:`plan_transfer` therefore serves every state-dict type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fsdp_flat.layout.interval import Interval
from fsdp_flat.layout.partition import EvenPartition, Partition


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
    """Plan the part of ``rank`` in transferring a tensor from one partition to another.

    Results are cached, because a training run needs the same plans for every checkpoint.

    Args:
        held: the source partition of the flattened tensor; no element may be on two ranks.
        wanted: the target partition.
        rank: the rank to plan for.
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


def chunk_rows(rows: int, world_size: int, rank: int) -> Interval:
    """Return a rank's rows of ``rows`` rows, by torch.chunk's rule; empty and at the end if none are left."""
    return chunk_partition((rows,), world_size)[rank]


def chunk_shape(shape: tuple[int, ...], world_size: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's dim-0 chunk; () for a scalar on rank 0."""
    if not shape:
        return (0,) if chunk_rows(1, world_size, rank).is_empty else ()
    return (chunk_rows(shape[0], world_size, rank).numel, *shape[1:])


def chunk_partition(shape: tuple[int, ...], world_size: int) -> EvenPartition:
    """Return the partition of the flattened parameter into dim-0 chunks."""
    rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    return EvenPartition(rows * width, math.ceil(rows / world_size) * width, 0, world_size)
