"""Describes the parameters that an optimizer holds as parts of a shard, and gives parts of a shard own storages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_flat.layout import GatherTarget, GroupedTarget, Interval, Layout, PerParamLayout, PerParamTarget


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


# Until flat/ calls the layout itself.
RowTarget = GatherTarget
GroupedRows = GroupedTarget


def views_of(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    return layout.views(flat)  # Until flat/ calls the layout itself.


def local_part(layout: Layout, index: int, rank: int, param: torch.Tensor) -> torch.Tensor:
    return layout.local_part(index, rank, param)  # Until flat/ calls the layout itself.


def clear_padding(shard: torch.Tensor, layout: Layout, rank: int) -> None:
    layout.clear_padding(shard, rank)  # Until flat/ calls the layout itself.


def shard_of(layout: Layout, rank: int, unsharded: torch.Tensor) -> torch.Tensor:
    return layout.shard_of(rank, unsharded)  # Until flat/ calls the layout itself.


def row_target(buffer: torch.Tensor, layout: Layout) -> PerParamTarget | None:
    return layout.gather_target(buffer)  # Until flat/ calls the layout itself.


def shards_of(buffer: torch.Tensor, layout: PerParamLayout, ranks: range) -> torch.Tensor:
    return layout.shards_of(ranks, buffer)  # Until flat/ calls the layout itself.


def grad_places(flat: torch.Tensor, layout: Layout) -> list[list[torch.Tensor]]:
    return layout.grad_places(flat)  # Until flat/ calls the layout itself.


def can_chunk(layout: Layout, *, on_accelerator: bool) -> bool:
    return layout.can_chunk_cat(on_accelerator=on_accelerator)  # Until flat/ calls the layout itself.


def split_grad(grad: torch.Tensor, layout: Layout, index: int) -> list[torch.Tensor]:
    return layout.split_grad(grad, index)  # Until flat/ calls the layout itself.
