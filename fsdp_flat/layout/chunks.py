"""Which elements move between flat shards and dim-0 chunks, the form of sharded state dicts.

torch's sharded checkpoints hold dim-0 chunks: ``tensor.chunk(world_size)``, so rank ``r`` has the rows from
``r * ceil(rows / world_size)``. A chunk of rows is a flat interval of the row-major parameter, and so is a rank's
piece of it, so what one rank sends another is an intersection of two intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_flat.layout.flat_layout import FlatLayout
from fsdp_flat.layout.interval import Interval

__all__ = ["Move", "chunk_interval", "chunk_shape", "moves"]


@dataclass(frozen=True, slots=True)
class Move:
    """One run of elements that ``holder`` has in its flat shard and ``owner`` has in its chunk.

    Attributes:
        index: the slot.
        in_param: the elements within the flattened parameter.
    """

    index: int
    in_param: Interval


def _rows(shape: tuple[int, ...], world_size: int, rank: int) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    step = math.ceil(rows / world_size)
    return min(rank * step, rows), min((rank + 1) * step, rows)


def chunk_shape(shape: tuple[int, ...], world_size: int, rank: int) -> tuple[int, ...]:
    """Shape of a rank's dim-0 chunk; () for a scalar on rank 0."""
    start, stop = _rows(shape, world_size, rank)
    if not shape:
        return () if stop > start else (0,)
    return (stop - start, *shape[1:])


def chunk_interval(shape: tuple[int, ...], world_size: int, rank: int) -> Interval:
    """A rank's dim-0 chunk as elements of the flattened parameter; empty if it has none."""
    start, stop = _rows(shape, world_size, rank)
    width = math.prod(shape[1:]) if shape else 1
    return Interval(start * width, stop * width)


def moves(layout: FlatLayout, holder: int, owner: int) -> tuple[Move, ...]:
    """What rank ``holder`` has of the chunks of rank ``owner``, in slot order."""
    found = []
    for piece in layout.shard_slots(holder):
        shape = layout.slots[piece.index].shape
        common = piece.in_param.intersect(chunk_interval(shape, layout.world_size, owner))
        if not common.is_empty:
            found.append(Move(piece.index, common))
    return tuple(found)
