"""Describes the layout of a flat buffer: the offset of each parameter, and its local shard on each rank.

A layout is a value computed from names, shapes and a world size alone, so every rank can compute every other rank's.
:class:`FlatLayout` equals the layout of torch FSDP1 element for element; ``tests/layout`` compares it with torch's
metadata. :class:`RowLayout` shards each parameter by itself, as FSDP2 does.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from fsdp_flat.errors import OptionError, UnevenDimError
from fsdp_flat.layout.intervals import EvenPartition, Interval, chunk_rows

_ALIGNMENT_NBYTES = 16


def alignment_numel(itemsize: int, *, use_orig_params: bool) -> int:
    """Return the alignment of parameters in elements: FSDP1 aligns to 16 bytes with ``use_orig_params`` only.

    ``itemsize`` is that of the dtype used in forward and backward.
    """
    return max(1, _ALIGNMENT_NBYTES // itemsize) if use_orig_params else 1


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """Locates one parameter in the flat buffer."""

    fqn: str
    shape: tuple[int, ...]
    offset: int
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def interval(self) -> Interval:
        return Interval(self.offset, self.offset + self.numel)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Locates one rank's local shard of parameter ``index``: its elements in the parameter, and in the rank's shard."""

    index: int
    in_param: Interval
    in_shard: Interval

    @property
    def numel(self) -> int:
        return self.in_param.numel

    @property
    def is_empty(self) -> bool:
        return self.in_param.is_empty


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Describes the flat buffer of several parameters, split into one shard of equal length per rank.

    Attributes:
        param_infos: the parameters, in buffer order.
        numel: elements of the full buffer with all padding, a multiple of ``world_size``.
        world_size: number of ranks over which the buffer is sharded; 1 for NO_SHARD.
        unpadded_numel: elements of FSDP1's unpadded unsharded flat parameter (``_unpadded_unsharded_size``), the
            content of a flat checkpoint: the parameters, the padding between them, and with
            ``use_orig_params=True`` the tail padding too.
    """

    param_infos: tuple[ParamInfo, ...]
    numel: int
    world_size: int
    unpadded_numel: int

    def __post_init__(self) -> None:
        first: dict[str, int] = {}
        for index, fqn in enumerate(self.fqns):
            if first.setdefault(fqn, index) != index:
                raise OptionError(f"a flat layout needs different names, got {fqn!r} at {first[fqn]} and {index}")
        assert self.param_infos[-1].interval.stop <= self.unpadded_numel <= self.numel
        assert self.numel % self.world_size == 0

    @classmethod
    def build(
        cls,
        params: Sequence[tuple[str, Sequence[int]]],
        *,
        world_size: int,
        align_numel: int = 1,
        tail_multiple: int | None = None,
    ) -> FlatLayout:
        """Lay out ``params`` (name and shape of each; at least one) one after another, as torch FSDP1 does.

        Each parameter, also an empty one, starts at the next multiple of ``align_numel``, counted from the buffer's
        start. The flat parameter ends at the next multiple of ``tail_multiple``, which gives ``unpadded_numel``. It is
        then padded to a multiple of ``world_size``, as in ``torch.chunk``; the last ranks may hold only padding.
        (FSDP1: ``FlatParamHandle._init_flat_param_and_metadata`` and ``_get_shard``.)

        ``tail_multiple`` is by default ``world_size`` where ``align_numel > 1`` and 1 otherwise. NO_SHARD with
        ``use_orig_params=True`` passes it: FSDP1 pads there to the size of the process group although nothing is
        sharded.

        Raises:
            OptionError: if names repeat.
        """
        if tail_multiple is None:
            tail_multiple = world_size if align_numel > 1 else 1
        param_infos: list[ParamInfo] = []
        end = 0
        for fqn, shape in params:
            param_infos.append(ParamInfo(fqn, tuple(shape), _round_up(end, align_numel)))
            end = param_infos[-1].interval.stop
        unpadded_numel = _round_up(end, tail_multiple)
        return cls(tuple(param_infos), _round_up(unpadded_numel, world_size), world_size, unpadded_numel)

    @property
    def shard_numel(self) -> int:
        """Number of elements of one rank's shard, padding included; equal on every rank."""
        return self.numel // self.world_size

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(param_info.fqn for param_info in self.param_infos)

    def shard(self, rank: int) -> Interval:
        """Return the elements of the flat buffer that ``rank`` holds, padding included."""
        assert 0 <= rank < self.world_size
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def local_shard(self, index: int, rank: int) -> LocalShard:
        """Return the local shard of parameter ``index`` that ``rank`` holds.

        An empty one lies at the parameter's end that is nearest to the rank's shard.
        """
        # The intersections of the parameter and the shard, as integers: every unit asks for all its local shards.
        param_info, size = self.param_infos[index], self.shard_numel
        first, before = param_info.offset, rank * size
        stop = first + param_info.numel
        start = min(max(first, before), stop)
        numel = max(0, min(stop, before + size) - start)
        in_param, in_shard = start - first, min(max(before, first), before + size) - before
        return LocalShard(index, Interval(in_param, in_param + numel), Interval(in_shard, in_shard + numel))

    def local_shards(self, rank: int) -> tuple[LocalShard, ...]:
        """Return the non-empty local shards that ``rank`` holds, in shard order."""
        found = (self.local_shard(index, rank) for index in self._near(rank))
        return tuple(local_shard for local_shard in found if not local_shard.is_empty)

    def _near(self, rank: int) -> range:
        """Return the indices of parameters of which ``rank`` may hold elements: few of many on most ranks."""
        offset, own = attrgetter("offset"), self.shard(rank)
        first = bisect_right(self.param_infos, own.start, key=offset)
        return range(max(0, first - 1), bisect_left(self.param_infos, own.stop, key=offset))

    def partition(self, index: int) -> EvenPartition:
        """Return the partition of the flattened parameter ``index``."""
        param_info = self.param_infos[index]
        return EvenPartition(param_info.numel, self.shard_numel, param_info.offset, self.world_size)

    def paddings(self) -> tuple[Interval, ...]:
        """Return the padding intervals of the flat buffer, in order: alignment gaps and the tail."""
        stops = (0, *(param_info.interval.stop for param_info in self.param_infos))
        starts = (*(param_info.offset for param_info in self.param_infos), self.numel)
        return tuple(Interval(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start)

    def shard_paddings(self, rank: int) -> tuple[Interval, ...]:
        """Return the padding intervals of a rank's shard, in order, relative to the shard."""
        held = [local_shard.in_shard for local_shard in self.local_shards(rank)]
        starts, stops = [0, *(each.stop for each in held)], [*(each.start for each in held), self.shard_numel]
        return tuple(Interval(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class RowLayout(FlatLayout):
    """Describes the buffers of several parameters, each sharded by itself along one of its dims.

    Two orders of the same elements occur:

    * In the *unsharded buffer* every parameter is contiguous, so that modules can use it in place. ``param_infos`` are
      offsets in this order.
    * In *rank order* the shards of all ranks follow each other; a shard is the concatenation of one rank's chunks of
      all parameters. Shards and flat gradients are in this order, and so are ``shard``, ``paddings`` and ``in_shard``.

    Chunks are those of ``torch.chunk``, padded to equal size. Only dim 0 may be uneven. Intervals in a parameter
    (``in_param``, ``partition``) count its elements with the sharded dim moved to the front.

    Attributes:
        dims: the sharded dim of each parameter.
        chunk_shapes: the shape of a rank's padded chunk of each parameter, equal on every rank.
        chunks: the interval of each padded chunk in a shard.
        full_ranks: for each parameter, the number of ranks with a chunk without padding, and the rows of the next rank.
    """

    dims: tuple[int, ...]
    chunk_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    chunks: tuple[Interval, ...] = field(init=False, repr=False, compare=False)
    full_ranks: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        FlatLayout.__post_init__(self)
        shapes, chunks, full_ranks, end = [], [], [], 0
        for param_info, dim in zip(self.param_infos, self.dims, strict=True):
            shape = _chunk_shape(param_info.shape, dim, self.world_size)
            shapes.append(shape)
            chunks.append(Interval(end, end + math.prod(shape)))
            end = chunks[-1].stop
            full_ranks.append(divmod(param_info.shape[dim], shape[dim]) if shape[dim] else (self.world_size, 0))
        for name, value in (("chunk_shapes", shapes), ("chunks", chunks), ("full_ranks", full_ranks)):
            object.__setattr__(self, name, tuple(value))

    @classmethod
    def of_rows(cls, params: Sequence[tuple[str, Sequence[int]]], dims: Sequence[int], *, world_size: int) -> RowLayout:
        """Lay out ``params`` one after another, each padded to equal chunks along its dim (of ``dims``, non-negative).

        Raises an OptionError if names repeat, for a scalar, and for a dim other than 0 that is not divisible by
        ``world_size``.
        """
        param_infos: list[ParamInfo] = []
        end = 0
        for (fqn, size), dim in zip(params, dims, strict=True):
            shape = tuple(size)
            if not shape:
                raise OptionError(
                    f"Parameter {fqn!r} is a scalar, which has no dim to shard. Make it a 1-D tensor of one element, "
                    "or pass it in ignored_params."
                )
            if dim > 0 and shape[dim] % world_size:
                raise UnevenDimError(
                    f"Parameter {fqn!r} of shape {shape} cannot be sharded on dim {dim} over {world_size} ranks: a dim "
                    "other than 0 must be divisible by the number of ranks. Shard it on dim 0."
                )
            param_infos.append(ParamInfo(fqn, shape, end))
            end += world_size * math.prod(_chunk_shape(shape, dim, world_size))
        return cls(tuple(param_infos), end, world_size, end, tuple(dims))

    def rows(self, index: int, rank: int) -> Interval:
        """Return the rows, along the sharded dim, of parameter ``index`` that ``rank`` holds."""
        return chunk_rows(self.param_infos[index].shape[self.dims[index]], self.world_size, rank)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of parameter ``index``, without padding."""
        shape, dim = self.param_infos[index].shape, self.dims[index]
        return (*shape[:dim], self.rows(index, rank).numel, *shape[dim + 1 :])

    def local_shard(self, index: int, rank: int) -> LocalShard:
        in_param, chunk = self.partition(index)[rank], self.chunks[index]
        return LocalShard(index, in_param, Interval(chunk.start, chunk.start + in_param.numel))

    def _near(self, rank: int) -> range:
        return range(len(self.param_infos))

    def partition(self, index: int) -> EvenPartition:
        return EvenPartition(self.param_infos[index].numel, max(1, self.chunks[index].numel), 0, self.world_size)

    def paddings(self) -> tuple[Interval, ...]:
        """Return the padding intervals of a tensor in rank order."""
        return tuple(
            padding.shift(rank * self.shard_numel)
            for rank in range(self.world_size)
            for padding in self.shard_paddings(rank)
        )


def _chunk_shape(shape: tuple[int, ...], dim: int, world_size: int) -> tuple[int, ...]:
    return (*shape[:dim], math.ceil(shape[dim] / world_size), *shape[dim + 1 :])
