"""Describes the flat layout: the offset of each parameter in the flat buffer, and its local shard on each rank.

A layout is a value computed from names, shapes and a world size alone, so every rank can compute every other rank's.
It equals the layout of torch FSDP1 element for element; ``tests/layout`` compares it with torch's metadata.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fsdp_flat.errors import OptionError
from fsdp_flat.layout.interval import Interval
from fsdp_flat.layout.partition import EvenPartition

_ALIGNMENT_NBYTES = 16


def alignment_numel(itemsize: int, *, use_orig_params: bool) -> int:
    """Return the alignment of parameters in elements: ``max(1, 16 // itemsize)``, or 1 for no alignment.

    FSDP1 aligns parameters to 16 bytes of the dtype used in forward and backward when ``use_orig_params=True``, and
    does not align them otherwise.

    Args:
        itemsize: bytes per element of the forward and backward dtype.
        use_orig_params: the constructor option.

    Raises:
        OptionError: if ``itemsize`` is below 1.
    """
    if itemsize < 1:
        raise OptionError(f"alignment_numel: itemsize is a number of bytes of at least 1, got {itemsize}")
    return max(1, _ALIGNMENT_NBYTES // itemsize) if use_orig_params else 1


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """Locates one parameter in the flat buffer.

    Args:
        fqn: the parameter's FQN.
        shape: its shape; () for a scalar, which has one element; a dim of 0 makes an empty parameter.
        offset: index of its first element in the flat buffer.

    Attributes:
        interval: its elements in the flat buffer.
        numel: its number of elements.

    Raises:
        OptionError: if a dim or the offset is negative or not an int.
    """

    fqn: str
    shape: tuple[int, ...]
    offset: int
    interval: Interval = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not all(isinstance(size, int) and size >= 0 for size in self.shape):
            raise OptionError(f"the shape of {self.fqn!r} must be ints of at least 0, got {self.shape}")
        if not (isinstance(self.offset, int) and self.offset >= 0):
            raise OptionError(f"the offset of {self.fqn!r} must be an int of at least 0, got {self.offset!r}")
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "interval", Interval(self.offset, self.offset + numel))


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Locates one rank's local shard of one parameter.

    Args:
        index: the parameter's index in the layout.
        in_param: the local shard's elements within the flattened parameter.
        in_shard: the same elements within the rank's shard.

    Raises:
        OptionError: if the two intervals differ in length, or ``index`` is negative.
    """

    index: int
    in_param: Interval
    in_shard: Interval

    def __post_init__(self) -> None:
        if self.index < 0:
            raise OptionError(f"a LocalShard's index is at least 0, got {self.index}")
        if self.in_param.numel != self.in_shard.numel:
            raise OptionError(
                f"the local shard of parameter {self.index} must be as long in the parameter as in the shard, "
                f"got {self.in_param} and {self.in_shard}"
            )

    @property
    def numel(self) -> int:
        """Number of elements of the local shard."""
        return self.in_param.numel

    @property
    def is_empty(self) -> bool:
        """Return whether the rank holds no element of the parameter."""
        return self.in_param.is_empty


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Describes the flat buffer of several parameters, split into one shard of equal length per rank.

    Args:
        param_infos: the parameters, in buffer order, without overlap.
        numel: elements of the full buffer with all padding, a multiple of ``world_size``.
        world_size: number of ranks over which the buffer is sharded; 1 for NO_SHARD.
        unpadded_numel: elements of FSDP1's unpadded unsharded flat parameter (``_unpadded_unsharded_size``), the
            content of a flat checkpoint: the parameters, the padding between them, and with
            ``use_orig_params=True`` the tail padding too.

    Raises:
        OptionError: if there are no parameters, if two have the same name or overlap, or if the sizes do not fit.
    """

    param_infos: tuple[ParamInfo, ...]
    numel: int
    world_size: int
    unpadded_numel: int
    _index: dict[str, int] = field(init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _stops: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _shards: dict[int, tuple[LocalShard, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise OptionError(f"a flat layout needs a world size of at least 1, got {self.world_size}")
        if not self.param_infos:
            raise OptionError("a flat layout needs at least one parameter, got none")
        index: dict[str, int] = {}
        end = 0
        for i, param_info in enumerate(self.param_infos):
            if param_info.fqn in index:
                raise OptionError(
                    f"a flat layout needs different names, got {param_info.fqn!r} at {index[param_info.fqn]} and {i}"
                )
            if param_info.offset < end:
                raise OptionError(f"{param_info.fqn!r} starts at {param_info.offset}, inside of what ends at {end}")
            index[param_info.fqn] = i
            end = param_info.interval.stop
        if not end <= self.unpadded_numel <= self.numel:
            raise OptionError(
                f"a flat layout needs end of the last parameter <= unpadded_numel <= numel, "
                f"got {end}, {self.unpadded_numel}, {self.numel}"
            )
        if self.numel % self.world_size:
            raise OptionError(f"{self.numel} elements cannot be cut into {self.world_size} equal shards")
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_starts", tuple(param_info.interval.start for param_info in self.param_infos))
        object.__setattr__(self, "_stops", tuple(param_info.interval.stop for param_info in self.param_infos))
        object.__setattr__(self, "_shards", {})

    @classmethod
    def build(
        cls,
        params: Sequence[tuple[str, Sequence[int]]],
        *,
        world_size: int,
        align_numel: int = 1,
        tail_multiple: int | None = None,
    ) -> FlatLayout:
        """Lay out ``params`` one after another, as torch FSDP1 does.

        Each parameter, also an empty one, starts at the next multiple of ``align_numel``, counted from the buffer's
        start. The flat parameter ends at the next multiple of ``tail_multiple``, which gives ``unpadded_numel``. It is
        then padded to a multiple of ``world_size``, so that a shard has ``ceil(unpadded_numel / world_size)``
        elements, as in ``torch.chunk``; the last ranks may hold only padding. (FSDP1:
        ``FlatParamHandle._init_flat_param_and_metadata`` and ``_get_shard``.)

        Args:
            params: name and shape of each parameter, each once.
            world_size: size of the shard group; 1 for NO_SHARD.
            align_numel: in elements, see :func:`alignment_numel`.
            tail_multiple: in elements; by default ``world_size`` where ``align_numel > 1`` and 1 otherwise. NO_SHARD
                with ``use_orig_params=True`` needs it: FSDP1 pads there to the size of the process group although
                nothing is sharded, which is ``world_size=1, tail_multiple=<size of the process group>``.

        Raises:
            OptionError: if there are no parameters, if names repeat, or if a size is below 1.
        """
        if tail_multiple is None:
            tail_multiple = world_size if align_numel > 1 else 1
        for name, value in (("world_size", world_size), ("align_numel", align_numel), ("tail_multiple", tail_multiple)):
            if value < 1:
                raise OptionError(f"FlatLayout.build: {name} is at least 1, got {value}")
        param_infos: list[ParamInfo] = []
        end = 0
        for fqn, shape in params:
            param_info = ParamInfo(fqn, tuple(shape), _round_up(end, align_numel))
            param_infos.append(param_info)
            end = param_info.interval.stop
        unpadded_numel = _round_up(end, tail_multiple)
        return cls(tuple(param_infos), _round_up(unpadded_numel, world_size), world_size, unpadded_numel)

    @property
    def shard_numel(self) -> int:
        """Number of elements of one rank's shard, padding included; equal on every rank."""
        return self.numel // self.world_size

    @property
    def fqns(self) -> tuple[str, ...]:
        """FQNs of the parameters, in buffer order."""
        return tuple(param_info.fqn for param_info in self.param_infos)

    def index_of(self, fqn: str) -> int:
        """Return the index of the parameter ``fqn``.

        Raises:
            OptionError: if there is no such parameter.
        """
        try:
            return self._index[fqn]
        except KeyError:
            raise OptionError(f"no parameter {fqn!r} in the {self.describe()}") from None

    def shard(self, rank: int) -> Interval:
        """Return the elements of the flat buffer that ``rank`` holds, padding included.

        Raises:
            OptionError: if there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            self._raise_rank(rank)
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def local_shard(self, index: int, rank: int) -> LocalShard:
        """Return the local shard of parameter ``index`` that ``rank`` holds, which may be empty.

        The ``in_param`` intervals of ranks 0, 1, ... are adjacent and cover the parameter; an empty one lies at the
        parameter's end that is nearest to the rank's shard.

        Raises:
            OptionError: if there is no such parameter or rank.
        """
        if not 0 <= rank < self.world_size:
            self._raise_rank(rank)
        self._slot(index)
        # The intersections of the parameter and the shard, as integers: every unit asks for all its local shards.
        first, last = self._starts[index], self._stops[index]
        shard_first = rank * self.shard_numel
        shard_last = shard_first + self.shard_numel
        start = min(max(first, shard_first), last)
        numel = max(0, min(last, shard_last) - start)
        in_param, in_shard = start - first, min(max(shard_first, first), shard_last) - shard_first
        return LocalShard(index, Interval(in_param, in_param + numel), Interval(in_shard, in_shard + numel))

    def partition(self, index: int) -> EvenPartition:
        """Return the partition of the flattened parameter ``index`` over the ranks.

        Raises:
            OptionError: if there is no such parameter.
        """
        param_info = self._slot(index)
        return EvenPartition(param_info.numel, self.shard_numel, param_info.offset, self.world_size)

    def local_shards(self, rank: int) -> tuple[LocalShard, ...]:
        """Return the non-empty local shards that ``rank`` holds, in shard order; cached per rank.

        Raises:
            OptionError: if there is no such rank.
        """
        found = self._shards.get(rank)
        if found is None:
            shard = self.shard(rank)
            first = bisect_right(self._stops, shard.start)
            last = bisect_left(self._starts, shard.stop)
            local_shards = (self.local_shard(index, rank) for index in range(first, last))
            found = self._shards[rank] = tuple(local_shard for local_shard in local_shards if not local_shard.is_empty)
        return found

    def paddings(self) -> tuple[Interval, ...]:
        """Return the padding intervals of the flat buffer, in order: alignment gaps and the tail."""
        stops = (0, *self._stops)
        starts = (*self._starts, self.numel)
        return tuple(Interval(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start)

    def shard_paddings(self, rank: int) -> tuple[Interval, ...]:
        """Return the padding intervals of a rank's shard, in order, relative to the shard.

        Raises:
            OptionError: if there is no such rank.
        """
        own = self.shard(rank)
        found = (own.intersect(padding).shift(-own.start) for padding in self.paddings())
        return tuple(padding for padding in found if not padding.is_empty)

    def describe(self) -> str:
        """Return one short line for error texts."""
        names = repr(self.param_infos[0].fqn)
        if len(self.param_infos) > 1:
            names += f" to {self.param_infos[-1].fqn!r}"
        return (
            f"flat layout of {len(self.param_infos)} parameter(s), {names}: {self.numel} elements "
            f"({self.numel - sum(param_info.numel for param_info in self.param_infos)} of padding), "
            f"{self.world_size} rank(s) of {self.shard_numel}"
        )

    def _raise_rank(self, rank: int) -> NoReturn:
        raise OptionError(f"rank must be in 0..{self.world_size - 1}, got {rank}, for the {self.describe()}")

    def _slot(self, index: int) -> ParamInfo:
        if not 0 <= index < len(self.param_infos):
            raise OptionError(
                f"parameter index must be in 0..{len(self.param_infos) - 1}, got {index}, for the {self.describe()}"
            )
        return self.param_infos[index]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
