"""Describes how several parameters are sharded: :class:`FlatLayout` as in FSDP1, :class:`PerParamLayout` as in FSDP2.

A layout is a value computed from names, shapes and a world size alone, so every rank can compute every other rank's.
:class:`Layout` states what both answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from fsdp_flat.core.gather_targets import PerParamTarget
from fsdp_flat.errors import OptionError, UnevenDimError
from fsdp_flat.layout.intervals import EvenPartition, Interval, chunk_rows

_ALIGNMENT_NBYTES = 16
# Largest number of elements of uneven gradients that are copied to pad them.
_MOST_PADDED = 1 << 14


def alignment_numel(itemsize: int, *, use_orig_params: bool) -> int:
    """Return the alignment of parameters in elements: FSDP1 aligns to 16 bytes with ``use_orig_params`` only.

    ``itemsize`` is that of the dtype used in forward and backward.
    """
    return max(1, _ALIGNMENT_NBYTES // itemsize) if use_orig_params else 1


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """Locates one parameter in the unsharded buffer."""

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
class Layout(ABC):
    """Describes the buffers of several parameters, split into one shard of equal length per rank.

    Two orders of the same elements occur:

    * In the *unsharded buffer* every parameter is contiguous, so that modules can use it in place.
    * In *rank order* the shards of all ranks follow each other. Shards, the output of an all-gather and the input of a
      reduce-scatter are in this order.

    In a :class:`FlatLayout` both orders are the same.

    Attributes:
        param_infos: the parameters, in order; offsets count in the unsharded buffer.
        numel: elements of the unsharded buffer with all padding, a multiple of ``world_size``.
        world_size: number of ranks over which the parameters are sharded; 1 for NO_SHARD.
        unpadded_numel: elements of FSDP1's unpadded unsharded flat parameter (``_unpadded_unsharded_size``), the
            content of a flat checkpoint: the parameters, the padding between them, and with
            ``use_orig_params=True`` the tail padding too. A per-parameter layout has no flat checkpoint: ``numel``.
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

    @property
    def shard_numel(self) -> int:
        """Number of elements of one rank's shard, padding included; equal on every rank."""
        return self.numel // self.world_size

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(param_info.fqn for param_info in self.param_infos)

    # -- the elements of each rank ---------------------------------------------------------------------------------

    def shard(self, rank: int) -> Interval:
        """Return the elements in rank order that ``rank`` holds, padding included."""
        assert 0 <= rank < self.world_size
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    @abstractmethod
    def partition(self, index: int) -> EvenPartition:
        """Return the partition of parameter ``index``, flattened with its sharded dim (dim 0 if flat) at the front."""

    @abstractmethod
    def local_shard(self, index: int, rank: int) -> LocalShard:
        """Return the local shard of parameter ``index`` that ``rank`` holds; ``in_param`` is ``partition``'s interval.

        An empty one lies at the end of the parameter, or of its place in the shard, that is nearest to the rank's.
        """

    @abstractmethod
    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of parameter ``index``, without padding; 1-D in a flat layout."""

    @abstractmethod
    def local_shards(self, rank: int) -> tuple[LocalShard, ...]:
        """Return the non-empty local shards that ``rank`` holds, in shard order."""

    def shard_paddings(self, rank: int) -> tuple[Interval, ...]:
        """Return the padding intervals of a rank's shard, in order, relative to the shard."""
        held = [local_shard.in_shard for local_shard in self.local_shards(rank)]
        starts, stops = [0, *(each.stop for each in held)], [*(each.start for each in held), self.shard_numel]
        return tuple(Interval(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)

    @abstractmethod
    def paddings(self) -> tuple[Interval, ...]:
        """Return the padding intervals of a tensor in rank order (``numel``), in order."""

    # -- tensors ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def gathers_in_place(self) -> bool:
        """Rank order is the order of the unsharded buffer, so that an all-gather can write to it."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each parameter, in its shape, in ``flat`` (1-D, ``numel``, in the unsharded order)."""
        return [flat[each.offset : each.offset + each.numel].view(each.shape) for each in self.param_infos]

    @abstractmethod
    def local_part(self, index: int, rank: int, param: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of ``param``, the full parameter ``index``, as 1-D in the order of the shard."""

    @abstractmethod
    def shard_of(self, rank: int, unsharded: torch.Tensor) -> torch.Tensor:
        """Return a rank's shard (1-D, ``shard_numel``) of a tensor in the unsharded order, possibly a view of it."""

    @abstractmethod
    def unsharded_of(self, ranked: torch.Tensor) -> torch.Tensor:
        """Return ``ranked`` (1-D, ``numel``, in rank order) in the unsharded order, possibly ``ranked`` itself."""

    @abstractmethod
    def gather_target(self, buffer: torch.Tensor) -> PerParamTarget | None:
        """Return what places all-gathered shards in ``buffer`` (unsharded); None if the all-gather is in place."""

    def clear_padding(self, shard: torch.Tensor, rank: int) -> None:
        """Set the padding of a rank's shard (1-D, ``shard_numel``) to zero."""
        for padding in self.shard_paddings(rank):
            shard[padding.to_slice()].zero_()

    @abstractmethod
    def grad_places(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return for each parameter the views of a gradient in rank order that take the pieces of ``split_grad``."""

    @abstractmethod
    def split_grad(self, grad: torch.Tensor, index: int) -> list[torch.Tensor]:
        """Split the gradient of a parameter (the parameter's shape) into a piece for each of its ``grad_places``."""

    @abstractmethod
    def can_chunk_cat(self, *, on_accelerator: bool) -> bool:
        """Return whether ``chunk_cat`` lays out gradients in one operation, as fast as copies to ``grad_places``.

        On the CPU ``chunk_cat`` pads a copy of each uneven gradient, so uneven gradients must have few elements there.
        """


@dataclass(frozen=True, slots=True)
class FlatLayout(Layout):
    """Lays out parameters one after another, and splits the whole at equal steps: each shard is a part of the buffer.

    It equals the layout of torch FSDP1 element for element; ``tests/layout`` compares it with torch's metadata.
    """

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

    def partition(self, index: int) -> EvenPartition:
        param_info = self.param_infos[index]
        return EvenPartition(param_info.numel, self.shard_numel, param_info.offset, self.world_size)

    def local_shard(self, index: int, rank: int) -> LocalShard:
        # The intersections of the parameter and the shard, as integers: every unit asks for all its local shards.
        param_info, size = self.param_infos[index], self.shard_numel
        first, before = param_info.offset, rank * size
        stop = first + param_info.numel
        start = min(max(first, before), stop)
        numel = max(0, min(stop, before + size) - start)
        in_param, in_shard = start - first, min(max(before, first), before + size) - before
        return LocalShard(index, Interval(in_param, in_param + numel), Interval(in_shard, in_shard + numel))

    def local_shape(self, index: int, rank: int) -> tuple[int]:
        return (self.local_shard(index, rank).numel,)

    def local_shards(self, rank: int) -> tuple[LocalShard, ...]:
        # The rank may hold elements of these parameters alone: few of many on most ranks.
        offset, own = attrgetter("offset"), self.shard(rank)
        first = max(0, bisect_right(self.param_infos, own.start, key=offset) - 1)
        near = range(first, bisect_left(self.param_infos, own.stop, key=offset))
        return _without_empty(self.local_shard(index, rank) for index in near)

    def paddings(self) -> tuple[Interval, ...]:
        """Return the padding intervals of the buffer, in order: alignment gaps and the tail."""
        stops = (0, *(param_info.interval.stop for param_info in self.param_infos))
        starts = (*(param_info.offset for param_info in self.param_infos), self.numel)
        return tuple(Interval(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start)

    @property
    def gathers_in_place(self) -> bool:
        return True

    def local_part(self, index: int, rank: int, param: torch.Tensor) -> torch.Tensor:
        return param.reshape(-1)[self.local_shard(index, rank).in_param.to_slice()]

    def shard_of(self, rank: int, unsharded: torch.Tensor) -> torch.Tensor:
        return unsharded[self.shard(rank).to_slice()]

    def unsharded_of(self, ranked: torch.Tensor) -> torch.Tensor:
        return ranked

    def gather_target(self, buffer: torch.Tensor) -> None:
        return None

    def grad_places(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[view] for view in self.views(flat)]

    def split_grad(self, grad: torch.Tensor, index: int) -> list[torch.Tensor]:
        return [grad]

    def can_chunk_cat(self, *, on_accelerator: bool) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PerParamLayout(Layout):
    """Shards each parameter by itself along one of its dims, as FSDP2 does.

    A shard is the concatenation of one rank's chunks of all parameters. Chunks are those of ``torch.chunk``, padded to
    equal size. Only dim 0 may be uneven.

    Attributes:
        dims: the sharded dim of each parameter.
        chunk_shapes: the shape of a rank's padded chunk of each parameter, equal on every rank.
        chunks: the interval of each padded chunk in a shard.
        full_ranks: for each parameter, the number of ranks with a chunk without padding, and the size of the next
            rank's chunk along the sharded dim.
    """

    dims: tuple[int, ...]
    chunk_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    chunks: tuple[Interval, ...] = field(init=False, repr=False, compare=False)
    full_ranks: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Layout.__post_init__(self)
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
    def build(
        cls, params: Sequence[tuple[str, Sequence[int]]], dims: Sequence[int], *, world_size: int
    ) -> PerParamLayout:
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

    def dim_interval(self, index: int, rank: int) -> Interval:
        """Return the indices along the sharded dim of parameter ``index`` that ``rank`` holds."""
        return chunk_rows(self.param_infos[index].shape[self.dims[index]], self.world_size, rank)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        shape, dim = self.param_infos[index].shape, self.dims[index]
        return (*shape[:dim], self.dim_interval(index, rank).numel, *shape[dim + 1 :])

    def partition(self, index: int) -> EvenPartition:
        return EvenPartition(self.param_infos[index].numel, max(1, self.chunks[index].numel), 0, self.world_size)

    def local_shard(self, index: int, rank: int) -> LocalShard:
        in_param, chunk = self.partition(index)[rank], self.chunks[index]
        return LocalShard(index, in_param, Interval(chunk.start, chunk.start + in_param.numel))

    def local_shards(self, rank: int) -> tuple[LocalShard, ...]:
        return _without_empty(self.local_shard(index, rank) for index in range(len(self.param_infos)))

    def paddings(self) -> tuple[Interval, ...]:
        return tuple(
            padding.shift(rank * self.shard_numel)
            for rank in range(self.world_size)
            for padding in self.shard_paddings(rank)
        )

    @property
    def gathers_in_place(self) -> bool:
        return self.world_size == 1

    def local_part(self, index: int, rank: int, param: torch.Tensor) -> torch.Tensor:
        held = self.dim_interval(index, rank)
        return param.narrow(self.dims[index], held.start, held.numel).reshape(-1)

    def shard_of(self, rank: int, unsharded: torch.Tensor) -> torch.Tensor:
        if self.gathers_in_place:
            return unsharded
        shard, params = unsharded.new_zeros(self.shard_numel), self.views(unsharded)
        for part in self.local_shards(rank):
            shard[part.in_shard.to_slice()] = self.local_part(part.index, rank, params[part.index])
        return shard

    def unsharded_of(self, ranked: torch.Tensor) -> torch.Tensor:
        if self.gathers_in_place:
            return ranked
        unsharded = torch.empty_like(ranked)
        PerParamTarget(self.chunks_in(unsharded), self.dims).place(0, ranked.view(self.world_size, -1))
        return unsharded

    def chunks_in(self, unsharded: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter in the unsharded buffer, padding included, as a view ``(world_size, *chunk shape)``."""
        found = []
        for param_info, chunk, shape, dim in zip(
            self.param_infos, self.chunks, self.chunk_shapes, self.dims, strict=True
        ):
            padded = (*shape[:dim], self.world_size * shape[dim], *shape[dim + 1 :])
            start = param_info.offset
            region = unsharded[start : start + self.world_size * chunk.numel].view(padded)
            found.append(region.unflatten(dim, (self.world_size, shape[dim])).movedim(dim, 0))
        return found

    def gather_target(self, buffer: torch.Tensor) -> PerParamTarget | None:
        return None if self.gathers_in_place else PerParamTarget(self.chunks_in(buffer), self.dims)

    def grad_places(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        shards = flat.view(self.world_size, self.shard_numel)
        places = []
        for chunk, shape, (full, rest) in zip(self.chunks, self.chunk_shapes, self.full_ranks, strict=True):
            by_rank = shards[:, chunk.to_slice()].view(self.world_size, *shape)
            places.append([by_rank[:full], by_rank[full, :rest]] if rest else [by_rank[:full]])
        return places

    def split_grad(self, grad: torch.Tensor, index: int) -> list[torch.Tensor]:
        dim, shape = self.dims[index], self.chunk_shapes[index]
        full, rest = self.full_ranks[index]
        if dim == 0 and not rest:
            return [grad.view(full, *shape)]
        step = shape[dim]
        whole = grad.narrow(dim, 0, full * step).unflatten(dim, (full, step)).movedim(dim, 0)
        return [whole, grad.narrow(dim, full * step, rest)] if rest else [whole]

    def can_chunk_cat(self, *, on_accelerator: bool) -> bool:
        if any(self.dims):
            return False
        numels = [param_info.numel for param_info in self.param_infos]
        uneven = sum(numel for numel, (_, rest) in zip(numels, self.full_ranks, strict=True) if rest)
        return 0 not in numels and (on_accelerator or uneven <= _MOST_PADDED)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunk_shape(shape: tuple[int, ...], dim: int, world_size: int) -> tuple[int, ...]:
    return (*shape[:dim], math.ceil(shape[dim] / world_size), *shape[dim + 1 :])


def _without_empty(local_shards: Iterable[LocalShard]) -> tuple[LocalShard, ...]:
    return tuple(local_shard for local_shard in local_shards if not local_shard.is_empty)
