"""Describes the row layout: each parameter is sharded by itself, along one of its dims, as FSDP2 does.

Two orders of the same elements occur:

* In the *unsharded buffer* every parameter is contiguous, so that modules can use it in place. ``param_infos`` are
  offsets in this order.
* In *rank order* the shards of all ranks follow each other; a shard is the concatenation of one rank's chunks of all
  parameters. Shards and flat gradients are in this order, and so are ``shard``, ``paddings`` and ``in_shard``.

Chunks are those of ``torch.chunk``, padded to equal size. Only dim 0 may be uneven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_flat.errors import OptionError
from fsdp_flat.layout.flat_layout import FlatLayout, LocalShard, ParamInfo
from fsdp_flat.layout.interval import Interval
from fsdp_flat.layout.partition import EvenPartition


@dataclass(frozen=True, slots=True)
class RowLayout(FlatLayout):
    """Describes the buffers of several parameters, each sharded along one dim.

    Intervals in a parameter (``in_param``, ``partition``) count its elements with the sharded dim moved to the front.

    Args:
        dims: the sharded dim of each parameter.

    Attributes:
        chunk_shapes: the shape of a rank's padded chunk of each parameter, equal on every rank.
        chunks: the interval of each padded chunk in a shard.
    """

    dims: tuple[int, ...]
    chunk_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    chunks: tuple[Interval, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        FlatLayout.__post_init__(self)
        shapes = tuple(
            _chunk_shape(param_info.shape, dim, self.world_size)
            for param_info, dim in zip(self.param_infos, self.dims, strict=True)
        )
        chunks, end = [], 0
        for shape in shapes:
            chunks.append(Interval(end, end + math.prod(shape)))
            end = chunks[-1].stop
        object.__setattr__(self, "chunk_shapes", shapes)
        object.__setattr__(self, "chunks", tuple(chunks))

    @classmethod
    def of_rows(cls, params: Sequence[tuple[str, Sequence[int]]], dims: Sequence[int], *, world_size: int) -> RowLayout:
        """Lay out ``params`` one after another, each padded to equal chunks along its dim.

        Args:
            params: name and shape of each parameter, each once.
            dims: the dim along which each is sharded, non-negative; 0 for a scalar, which is an error.
            world_size: size of the shard group.

        Raises:
            OptionError: if there are no parameters, names repeat, a parameter is a scalar, or a dim other than 0 is not
                divisible by ``world_size``.
        """
        param_infos: list[ParamInfo] = []
        end = 0
        for (fqn, shape), dim in zip(params, dims, strict=True):
            _check(fqn, tuple(shape), dim, world_size)
            param_infos.append(ParamInfo(fqn, tuple(shape), end))
            end += world_size * math.prod(_chunk_shape(tuple(shape), dim, world_size))
        return cls(tuple(param_infos), end, world_size, end, tuple(dims))

    def rows(self, index: int, rank: int) -> Interval:
        """Return the rows, along the sharded dim, of parameter ``index`` that ``rank`` holds."""
        dim = self.dims[index]
        num_rows, step = self._slot(index).shape[dim], self.chunk_shapes[index][dim]
        start = min(rank * step, num_rows)
        return Interval(start, min(start + step, num_rows))

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of parameter ``index``, without padding."""
        shape, dim = self._slot(index).shape, self.dims[index]
        return (*shape[:dim], self.rows(index, rank).numel, *shape[dim + 1 :])

    def local_shard(self, index: int, rank: int) -> LocalShard:
        if not 0 <= rank < self.world_size:
            self._raise_rank(rank)
        chunk, numel = self.chunks[index], math.prod(self.local_shape(index, rank))
        start = min(rank * chunk.numel, self.param_infos[index].numel)
        return LocalShard(index, Interval(start, start + numel), Interval(chunk.start, chunk.start + numel))

    def partition(self, index: int) -> EvenPartition:
        return EvenPartition(self._slot(index).numel, max(1, self.chunks[index].numel), 0, self.world_size)

    def local_shards(self, rank: int) -> tuple[LocalShard, ...]:
        found = (self.local_shard(index, rank) for index in range(len(self.param_infos)))
        return tuple(local_shard for local_shard in found if not local_shard.is_empty)

    def paddings(self) -> tuple[Interval, ...]:
        """Return the padding intervals of a tensor in rank order."""
        return tuple(
            padding.shift(rank * self.shard_numel)
            for rank in range(self.world_size)
            for padding in self.shard_paddings(rank)
        )

    def shard_paddings(self, rank: int) -> tuple[Interval, ...]:
        found = (
            Interval(self.local_shard(index, rank).in_shard.stop, chunk.stop) for index, chunk in enumerate(self.chunks)
        )
        return tuple(padding for padding in found if not padding.is_empty)


def _chunk_shape(shape: tuple[int, ...], dim: int, world_size: int) -> tuple[int, ...]:
    return (*shape[:dim], math.ceil(shape[dim] / world_size), *shape[dim + 1 :])


def _check(fqn: str, shape: tuple[int, ...], dim: int, world_size: int) -> None:
    if not shape:
        raise OptionError(
            f"Parameter {fqn!r} is a scalar, which has no dim to shard. Make it a 1-D tensor of one element, or "
            "pass it in ignored_params."
        )
    if dim > 0 and shape[dim] % world_size:
        raise OptionError(
            f"Parameter {fqn!r} of shape {shape} cannot be sharded on dim {dim} over {world_size} ranks: a dim other "
            "than 0 must be divisible by the number of ranks. Shard it on dim 0."
        )
