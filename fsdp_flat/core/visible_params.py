"""Describes the parameters that an optimizer holds as parts of a shard, and gives parts of a shard own storages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_flat.core.layout import PerParamLayout
from fsdp_flat.layout import Interval


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


def local_parts(layout: PerParamLayout, rank: int) -> list[tuple[Interval, tuple[int, ...]]]:
    """Return for each parameter the interval of its local tensor in a rank's shard, and its shape."""
    indices = range(len(layout.param_infos))
    return [(layout.local_shard(index, rank).in_shard, layout.local_shape(index, rank)) for index in indices]


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
