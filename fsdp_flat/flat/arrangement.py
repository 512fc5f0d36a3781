"""Finds a layout's parameters inside flat tensors: views of parameters, parts of ranks, inputs of an all-gather.

A flat layout has one order of elements; a row layout has two (see ``layout/row_layout.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_flat.layout import FlatLayout, RowLayout

__all__ = ["Place", "local_part", "place_rows", "views_of"]

Place = Callable[[int, torch.Tensor], None]
"""Copies ``(first rank, rows)`` into a buffer; ``rows`` is 2-D, each row the shard of one more rank."""


def views_of(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Return each parameter of a tensor like the unsharded buffer (1-D, ``layout.numel``), as a view of its shape."""
    return [flat[param_info.interval.to_slice()].view(param_info.shape) for param_info in layout.param_infos]


def local_part(layout: FlatLayout, index: int, rank: int, param: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of parameter ``index``, given the full tensor, in the order of the shard (1-D)."""
    if isinstance(layout, RowLayout):
        dim = layout.dims[index]
        first = min(rank * layout.chunk_shapes[index][dim], param.shape[dim])
        return param.narrow(dim, first, layout.num_rows(index, rank)).reshape(-1)
    return param.reshape(-1)[layout.local_shard(index, rank).in_param.to_slice()]


def place_rows(buffer: torch.Tensor, layout: RowLayout) -> Place:
    """Return a function that copies shards of ranks into the unsharded buffer."""
    ranked = [_by_rank(buffer, layout, index) for index in range(len(layout.param_infos))]
    sizes = [chunk.numel for chunk in layout.chunks]
    # Chunks along dim 0 are contiguous in the buffer, so they are copied as rows. Views are made once: each costs as
    # much host time as a copy of a small parameter.
    shapes = {index: shape for index, shape in enumerate(layout.chunk_shapes) if layout.dims[index] != 0}
    ranked = [
        each if index in shapes else each.view(layout.world_size, size)
        for index, (each, size) in enumerate(zip(ranked, sizes, strict=True))
    ]
    targets: dict[tuple[int, int], list[torch.Tensor]] = {}

    def place(first: int, rows: torch.Tensor) -> None:
        key = first, first + len(rows)
        if key not in targets:
            targets[key] = [each[slice(*key)] for each in ranked]
        sources = list(rows.split(sizes, 1))
        for index, shape in shapes.items():
            sources[index] = sources[index].view(-1, *shape)
        torch._foreach_copy_(targets[key], sources)

    return place


def _by_rank(buffer: torch.Tensor, layout: RowLayout, index: int) -> torch.Tensor:
    """Return a parameter in the unsharded buffer, padding included, as a view ``(world_size, *chunk shape)``."""
    param_info, shape, dim = layout.param_infos[index], layout.chunk_shapes[index], layout.dims[index]
    padded = (*shape[:dim], layout.world_size * shape[dim], *shape[dim + 1 :])
    start = param_info.offset
    region = buffer[start : start + layout.world_size * layout.chunks[index].numel].view(padded)
    return region.unflatten(dim, (layout.world_size, shape[dim])).movedim(dim, 0)
