"""Which elements move between ranks when a parameter that lies in one way is to lie in another.

torch's sharded checkpoints hold dim-0 chunks: ``tensor.chunk(world_size)``, so rank ``r`` has the rows from
``r * ceil(rows / world_size)``. A chunk of rows is a flat interval of the row-major parameter, and so is a rank's
piece of it, so what one rank sends another is an intersection of two intervals. A whole tensor on every rank, or on
one, is an interval as well: every form of checkpoint is made by :func:`moves_between`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_flat.layout.interval import Interval

__all__ = ["Moves", "chunk_interval", "chunk_rows", "chunk_shape", "moves_between"]


@dataclass(frozen=True, slots=True)
class Moves:
    """What one rank sends and receives of one tensor.

    Attributes:
        sends: (rank that gets it, elements of what this rank holds), by rank.
        receives: (rank that has it, elements of what this rank wants), by rank.
        kept: the same elements within what this rank holds and what it wants; None if it keeps nothing.
    """

    sends: tuple[tuple[int, slice], ...]
    receives: tuple[tuple[int, slice], ...]
    kept: tuple[slice, slice] | None


def moves_between(held: Sequence[Interval], wanted: Sequence[Interval], rank: int) -> Moves:
    """How rank ``rank`` takes part in bringing a tensor from where it is to where it is wanted.

    Args:
        held: by rank, the elements of the flattened tensor that it has; no element twice.
        wanted: by rank, the elements that it is to have.
        rank: the rank that asks.
    """
    own, target = held[rank], wanted[rank]
    sends = []
    receives = []
    kept = None
    for other in range(len(held)):
        out = own.intersect(wanted[other])
        if other == rank:
            if not out.is_empty:
                kept = (out.shift(-own.start).to_slice(), out.shift(-target.start).to_slice())
            continue
        if not out.is_empty:
            sends.append((other, out.shift(-own.start).to_slice()))
        into = target.intersect(held[other])
        if not into.is_empty:
            receives.append((other, into.shift(-target.start).to_slice()))
    return Moves(tuple(sends), tuple(receives), kept)


def chunk_rows(rows: int, world_size: int, rank: int) -> Interval:
    """The rows of a rank's chunk of ``rows`` rows, by torch.chunk's rule; empty at the end if none are left."""
    step = math.ceil(rows / world_size)
    return Interval(min(rank * step, rows), min((rank + 1) * step, rows))


def chunk_shape(shape: tuple[int, ...], world_size: int, rank: int) -> tuple[int, ...]:
    """Shape of a rank's dim-0 chunk; () for a scalar on rank 0."""
    if not shape:
        return (0,) if chunk_rows(1, world_size, rank).is_empty else ()
    return (chunk_rows(shape[0], world_size, rank).numel, *shape[1:])


def chunk_interval(shape: tuple[int, ...], world_size: int, rank: int) -> Interval:
    """A rank's dim-0 chunk as elements of the flattened parameter; empty if it has none."""
    rows = chunk_rows(shape[0] if shape else 1, world_size, rank)
    width = math.prod(shape[1:]) if shape else 1
    return Interval(rows.start * width, rows.stop * width)
