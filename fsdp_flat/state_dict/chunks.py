"""Between the flat shard of a handle and dim-0 chunks of its parameters: one exchange, a shard's worth of traffic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_flat.comm import Axis, exchange_runs
from fsdp_flat.layout import FlatLayout, Interval, chunk_interval, chunk_shape, moves

__all__ = ["chunks_to_shard", "shard_to_chunks"]


def shard_to_chunks(layout: FlatLayout, shard: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """This rank's dim-0 chunk of every parameter, given every rank's flat shard.

    Every rank of the axis must call this.

    Args:
        layout: the flat layout over the axis.
        shard: 1-D, ``layout.shard_numel`` elements.
        axis: the shard axis.

    Returns:
        By slot, tensors of their own; chunks without rows are empty.
    """
    rank, size = axis.rank, axis.size
    start = layout.shard(rank).start
    sent = [
        [shard[_in_shard(layout, move.index, start, move.in_param)] for move in moves(layout, rank, owner)]
        for owner in range(size)
    ]
    numels = [sum(move.in_param.numel for move in moves(layout, holder, rank)) for holder in range(size)]
    runs = exchange_runs([_cat(pieces, shard) for pieces in sent], numels, axis)
    shapes = [chunk_shape(slot.shape, size, rank) for slot in layout.slots]
    chunks = [shard.new_empty(shape) for shape in shapes]
    for holder, run in enumerate(runs):
        at = 0
        for move in moves(layout, holder, rank):
            chunk_start = chunk_interval(layout.slots[move.index].shape, size, rank).start
            target = chunks[move.index].view(-1)[move.in_param.shift(-chunk_start).to_slice()]
            target.copy_(run[at : at + move.in_param.numel])
            at += move.in_param.numel
    return chunks


def chunks_to_shard(layout: FlatLayout, chunks: Sequence[torch.Tensor | None], shard: torch.Tensor, axis: Axis) -> None:
    """Write dim-0 chunks into every rank's flat shard; the inverse of :func:`shard_to_chunks`.

    Every rank of the axis must call this, with the same slots missing.

    Args:
        layout: the flat layout over the axis.
        chunks: by slot this rank's chunk, or None for parameters that are left as they are.
        shard: 1-D, ``layout.shard_numel`` elements; written to.
        axis: the shard axis.
    """
    rank, size = axis.rank, axis.size
    there = [chunk is not None for chunk in chunks]
    sent = []
    for holder in range(size):
        pieces = []
        for move in moves(layout, holder, rank):
            chunk = chunks[move.index]
            if chunk is not None:
                chunk_start = chunk_interval(layout.slots[move.index].shape, size, rank).start
                flat = chunk.detach().reshape(-1).to(dtype=shard.dtype, device=shard.device)
                pieces.append(flat[move.in_param.shift(-chunk_start).to_slice()])
        sent.append(_cat(pieces, shard))
    wanted = [[move for move in moves(layout, rank, owner) if there[move.index]] for owner in range(size)]
    runs = exchange_runs(sent, [sum(move.in_param.numel for move in row) for row in wanted], axis)
    start = layout.shard(rank).start
    for row, run in zip(wanted, runs, strict=True):
        at = 0
        for move in row:
            shard[_in_shard(layout, move.index, start, move.in_param)].copy_(run[at : at + move.in_param.numel])
            at += move.in_param.numel


def _in_shard(layout: FlatLayout, index: int, start: int, in_param: Interval) -> slice:
    return in_param.shift(layout.slots[index].offset - start).to_slice()


def _cat(pieces: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)
