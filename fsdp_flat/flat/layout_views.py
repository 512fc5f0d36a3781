"""Finds a layout's parameters inside flat tensors: views of parameters, parts of ranks, inputs of an all-gather.

A flat layout has one order of elements; a row layout has two (see :class:`RowLayout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from fsdp_flat.layout import FlatLayout, Interval, RowLayout

# Largest number of elements of uneven gradients that are copied to pad them.
_MOST_PADDED = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class VisibleParam:
    """Describes a parameter that an optimizer holds: an original one, or the flat parameter.

    Attributes:
        indices: indices in the layout of the original parameters.
        in_shard: the part of the rank's shard that it holds; None for all.
        shape: the shape of its part on this rank; None for 1-D.
        is_elsewhere: it has elements, but none on this rank.
    """

    param: nn.Parameter
    indices: range
    in_shard: slice | None = None
    shape: tuple[int, ...] | None = None
    is_elsewhere: bool = False

    def part_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the parameter's part of a shard or its gradient (1-D, ``shard_numel``), as a view in ``shape``."""
        part = shard if self.in_shard is None else shard[self.in_shard]
        return part if self.shape is None else part.view(self.shape)


def views_of(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Return a view of each parameter, in its shape, in ``flat`` (1-D, ``layout.numel``, ordered as the buffer)."""
    return [flat[each.offset : each.offset + each.numel].view(each.shape) for each in layout.param_infos]


def split_storage(shard: torch.Tensor, parts: Iterable[tuple[Interval, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Return views of intervals of ``shard`` (1-D), each in its shape and with a storage of its elements alone.

    torch cannot copy a DTensor whose local tensor has a storage offset.
    """
    storage, itemsize, views = shard.untyped_storage(), shard.itemsize, []
    # Fake tensors have storages on the meta device.
    can_alias = storage.device.type != "meta" and type(shard) is torch.Tensor
    offset, blank = shard.storage_offset(), shard.new_empty(0)
    for interval, shape in parts:
        start, stop = interval.start, interval.stop
        if can_alias and start < stop:
            own = storage[(offset + start) * itemsize : (offset + stop) * itemsize]
            # ``.data`` is the cheapest way to another tensor with a version counter of its own.
            views.append(blank.data.set_(own, 0, shape))  # type: ignore[call-overload]
        else:
            views.append(shard[start:stop].view(shape))
    return views


def local_part(layout: FlatLayout, index: int, rank: int, param: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of ``param``, the full parameter ``index``, as 1-D in the order of the shard."""
    if isinstance(layout, RowLayout):
        rows = layout.rows(index, rank)
        return param.narrow(layout.dims[index], rows.start, rows.numel).reshape(-1)
    return param.reshape(-1)[layout.local_shard(index, rank).in_param.to_slice()]


def clear_padding(shard: torch.Tensor, layout: FlatLayout, rank: int) -> None:
    """Set the padding of a rank's shard (1-D, ``shard_numel``) to zero."""
    for padding in layout.shard_paddings(rank):
        shard[padding.to_slice()].zero_()


def shard_of(layout: FlatLayout, rank: int, unsharded: torch.Tensor) -> torch.Tensor:
    """Return a rank's shard (1-D, ``shard_numel``) of a tensor ordered as the unsharded buffer; padding is zero."""
    if not isinstance(layout, RowLayout) or layout.world_size == 1:
        return unsharded[layout.shard(rank).to_slice()]
    shard, params = unsharded.new_zeros(layout.shard_numel), views_of(unsharded, layout)
    for part in layout.local_shards(rank):
        shard[part.in_shard.to_slice()] = local_part(layout, part.index, rank, params[part.index])
    return shard


def unsharded_of(layout: FlatLayout, ranked: torch.Tensor) -> torch.Tensor:
    """Return ``ranked`` (1-D, the shards of all ranks one after another) in the order of the unsharded buffer."""
    if not isinstance(layout, RowLayout) or layout.world_size == 1:
        return ranked
    unsharded = torch.empty_like(ranked)
    BufferRows(unsharded, layout).place(0, ranked.view(layout.world_size, -1))
    return unsharded


class RowTarget:
    """Receives the rows of an all-gather; a row is the input of one rank (1-D)."""

    def place(self, first: int, rows: torch.Tensor) -> None:
        """Copy ``rows`` (2-D), of rank ``first`` and the ranks after it, to their places."""
        raise NotImplementedError

    def stage(self, own: torch.Tensor, rank: int, num_ranks: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Allocate memory for the rows of all ranks, and copy ``own`` (1-D), the row of ``rank``, to it.

        Returns:
            The memory (1-D, in rank order); and a function to be called once, when all rows are there: it places
            them, and may free the memory.
        """
        full = own.new_empty(num_ranks * own.numel())
        rows = full.view(num_ranks, -1)
        rows[rank].copy_(own)
        return full, partial(self.place, 0, rows)


class _Staging(NamedTuple):
    """Holds memory for the rows of all ranks, which is freed between all-gathers, and views of the memory."""

    full: torch.Tensor
    rows: torch.Tensor
    storage: torch.UntypedStorage
    nbytes: int
    own: torch.Tensor
    sources: list[torch.Tensor]


class BufferRows(RowTarget):
    """Places shards of ranks in the unsharded buffer of a row layout.

    Views are made once: each costs as much host time as a copy of a small parameter. On accelerators one operation
    copies all parameters, if all are sharded along dim 0; ``_foreach_copy_`` launches a slow kernel for each there,
    since the rows of a parameter are strided.
    """

    def __init__(self, buffer: torch.Tensor, layout: RowLayout, *, on_accelerator: bool | None = None) -> None:
        self._buffer = buffer
        self._sizes = [chunk.numel for chunk in layout.chunks]
        # Chunks along dim 0 are contiguous in the buffer, so they are copied as rows.
        self._shapes = {index: shape for index, shape in enumerate(layout.chunk_shapes) if layout.dims[index] != 0}
        self._ranked = [
            _by_rank(buffer, layout, index) if index in self._shapes else _by_rank(buffer, layout, index).flatten(1)
            for index in range(len(self._sizes))
        ]
        on_accelerator = buffer.device.type != "cpu" if on_accelerator is None else on_accelerator
        self._is_fused = on_accelerator and not self._shapes
        self._targets: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._staging: _Staging | None = None

    def place(self, first: int, rows: torch.Tensor) -> None:
        key = first, first + rows.size(0)
        if key not in self._targets:
            self._targets[key] = [each[slice(*key)] for each in self._ranked]
        if self._is_fused:
            torch.split_with_sizes_copy(rows, self._sizes, 1, out=self._targets[key])
        else:
            torch._foreach_copy_(self._targets[key], self._split(rows))

    def _split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        sources = list(torch.split_with_sizes(rows, self._sizes, 1))
        if not self._shapes:
            return sources
        return [
            source.view(len(rows), *self._shapes[index]) if index in self._shapes else source
            for index, source in enumerate(sources)
        ]

    def stage(self, own: torch.Tensor, rank: int, num_ranks: int) -> tuple[torch.Tensor, Callable[[], None]]:
        staging = self._staging
        # If memory was not freed, its all-gather failed and may still write to it.
        if staging is None or staging.storage.nbytes():
            full = torch.empty_like(self._buffer)
            rows, storage = full.view(num_ranks, -1), full.untyped_storage()
            sources = [] if self._is_fused else self._split(rows)
            staging = self._staging = _Staging(full, rows, storage, storage.nbytes(), rows[rank], sources)
        else:
            staging.storage.resize_(staging.nbytes)
        staging.own.copy_(own)
        return staging.full, self._place_staged

    def drop_staging(self) -> None:
        """Drop the memory of an all-gather that failed."""
        self._staging = None

    def _place_staged(self) -> None:
        assert self._staging is not None
        if self._is_fused:
            torch.split_with_sizes_copy(self._staging.rows, self._sizes, 1, out=self._ranked)
        else:
            torch._foreach_copy_(self._ranked, self._staging.sources)
        self._staging.storage.resize_(0)


def row_target(buffer: torch.Tensor, layout: FlatLayout) -> BufferRows | None:
    """Return a target that places shards in ``buffer``; None if the all-gather is in place."""
    return BufferRows(buffer, layout) if isinstance(layout, RowLayout) and layout.world_size > 1 else None


class GroupedRows(RowTarget):
    """Places rows of ``num_ranks`` shards each, of consecutive ranks, by the ``target`` of single shards."""

    def __init__(self, target: RowTarget, num_ranks: int) -> None:
        self._target, self._num_ranks = target, num_ranks

    def place(self, first: int, rows: torch.Tensor) -> None:
        self._target.place(first * self._num_ranks, rows.reshape(len(rows) * self._num_ranks, -1))


class _JoinedRows(RowTarget):
    """Splits rows into the rows of several targets, which place them."""

    def __init__(self, inputs: Sequence[tuple[torch.Tensor, RowTarget]]) -> None:
        self._targets = [target for _, target in inputs]
        self._sizes = [tensor.numel() for tensor, _ in inputs]

    def place(self, first: int, rows: torch.Tensor) -> None:
        for target, part in zip(self._targets, rows.split(self._sizes, 1), strict=True):
            target.place(first, part)


def join_inputs(inputs: Sequence[tuple[torch.Tensor, RowTarget | None]]) -> list[tuple[torch.Tensor, RowTarget | None]]:
    """Join inputs of all-gathers, with the targets of their rows, into one input for each dtype.

    An input without a target, which is all-gathered in place, stays by itself.
    """
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, RowTarget]]] = {}
    results: list[tuple[torch.Tensor, RowTarget | None]] = []
    for tensor, target in inputs:
        if target is None:
            results.append((tensor, None))
        else:
            by_dtype.setdefault(tensor.dtype, []).append((tensor, target))
    for some in by_dtype.values():
        results.append(some[0] if len(some) == 1 else (torch.cat([tensor for tensor, _ in some]), _JoinedRows(some)))
    return results


def shards_of(buffer: torch.Tensor, layout: RowLayout, ranks: range) -> torch.Tensor:
    """Return a copy (1-D) of the shards of consecutive ``ranks``, padding included, from the unsharded buffer."""
    rows = buffer.new_empty(len(ranks), layout.shard_numel)
    parts = rows.split([chunk.numel for chunk in layout.chunks], 1)
    pieces = [part.view(-1, *shape) for part, shape in zip(parts, layout.chunk_shapes, strict=True)]
    sources = [_by_rank(buffer, layout, index)[ranks.start : ranks.stop] for index in range(len(pieces))]
    torch._foreach_copy_(pieces, sources)
    return rows.view(-1)


def _by_rank(buffer: torch.Tensor, layout: RowLayout, index: int) -> torch.Tensor:
    """Return a parameter in the unsharded buffer, padding included, as a view ``(world_size, *chunk shape)``."""
    param_info, shape, dim = layout.param_infos[index], layout.chunk_shapes[index], layout.dims[index]
    padded = (*shape[:dim], layout.world_size * shape[dim], *shape[dim + 1 :])
    start = param_info.offset
    region = buffer[start : start + layout.world_size * layout.chunks[index].numel].view(padded)
    return region.unflatten(dim, (layout.world_size, shape[dim])).movedim(dim, 0)


def grad_places(flat: torch.Tensor, layout: FlatLayout) -> list[list[torch.Tensor]]:
    """Return for each parameter the views of a flat gradient that take the pieces of :func:`split_grad`."""
    if not isinstance(layout, RowLayout):
        return [[view] for view in views_of(flat, layout)]
    ranks = flat.view(layout.world_size, layout.shard_numel)
    places = []
    for index, (chunk, shape) in enumerate(zip(layout.chunks, layout.chunk_shapes, strict=True)):
        by_rank = ranks[:, chunk.to_slice()].view(layout.world_size, *shape)
        full, rest = layout.full_ranks[index]
        places.append([by_rank[:full], by_rank[full, :rest]] if rest else [by_rank[:full]])
    return places


def can_chunk(layout: FlatLayout, *, on_accelerator: bool) -> bool:
    """Return whether :func:`chunk_cat` lays out gradients as fast as copies to :func:`grad_places`, in one operation.

    On the CPU ``chunk_cat`` pads a copy of each uneven gradient, so uneven gradients must have few elements there.
    """
    if not isinstance(layout, RowLayout) or any(layout.dims):
        return False
    numels = [param_info.numel for param_info in layout.param_infos]
    uneven = sum(numel for numel, (_, rest) in zip(numels, layout.full_ranks, strict=True) if rest)
    return 0 not in numels and (on_accelerator or uneven <= _MOST_PADDED)


def split_grad(grad: torch.Tensor, layout: FlatLayout, index: int) -> list[torch.Tensor]:
    """Split the gradient of a parameter (the parameter's shape) into a piece for each of its :func:`grad_places`."""
    if not isinstance(layout, RowLayout):
        return [grad]
    dim, shape = layout.dims[index], layout.chunk_shapes[index]
    full, rest = layout.full_ranks[index]
    if dim == 0 and not rest:
        return [grad.view(full, *shape)]
    step = shape[dim]
    whole = grad.narrow(dim, 0, full * step).unflatten(dim, (full, step)).movedim(dim, 0)
    return [whole, grad.narrow(dim, full * step, rest)] if rest else [whole]
