"""Splits a flat interval of a row-major tensor into a few N-d boxes, the chunks that a checkpoint can store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdp_flat.errors import OptionError
from fsdp_flat.layout.interval import Interval


@dataclass(frozen=True, slots=True)
class Box:
    """Describes an N-d block of a tensor whose elements are contiguous in the flattened tensor.

    Args:
        offsets: per dim, the index of the first element.
        sizes: per dim, the number of elements; its product is ``interval.numel``.
        interval: the elements of the flattened (row-major) tensor that the box covers, in the same order, counted
            from the tensor's first element.

    Raises:
        OptionError: if the numbers of dims or of elements differ.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    interval: Interval

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise OptionError(f"a Box needs one offset and one size per dim, got {self.offsets} and {self.sizes}")
        numel = 1
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            if offset < 0 or size < 0:
                raise OptionError(f"a Box needs offsets and sizes of at least 0, got {self.offsets} and {self.sizes}")
            numel *= size
        if numel != self.interval.numel:
            raise OptionError(f"a Box of sizes {self.sizes} has {numel} elements, its interval {self.interval.numel}")

    def within(self, start: Sequence[int]) -> Box:
        """Return this box with its offsets relative to a larger tensor that holds this one at ``start``.

        The interval does not change.
        """
        offsets = tuple(offset + by for offset, by in zip(self.offsets, start, strict=True))
        return Box(offsets, self.sizes, self.interval)


@lru_cache(maxsize=1 << 14)
def boxes(shape: tuple[int, ...], interval: Interval) -> tuple[Box, ...]:
    """Split a flat interval of a row-major tensor into at most ``max(1, 2 * ndim - 1)`` boxes.

    Results are cached, because a training run needs the same boxes for every checkpoint.

    Let ``stride[d]`` be the product of ``shape[d + 1:]``. From the current position, the next box runs along the
    outermost dim ``d`` with ``position % stride[d] == 0`` and ``stop - position >= stride[d]``, for
    ``min((stop - position) // stride[d], shape[d] - position // stride[d] % shape[d])`` indices, and covers the dims
    inside ``d`` completely. A box that ends at the end of dim ``d`` is followed by one along an outer dim, for as long
    as one fits; from then on each box is followed by one along an inner dim. Each dim is thus used at most twice, and
    dim 0 at most once, since its end is the tensor's end: hence the bound.

    Args:
        shape: the tensor's shape; () for a scalar.
        interval: elements of the flattened tensor.

    Returns:
        The boxes in flat order; their intervals are adjacent and cover ``interval``. Empty for an empty interval;
        ``Box((), (), interval)`` for a scalar.

    Raises:
        OptionError: if the interval extends past the tensor's end, or a dim is negative.
    """
    strides: list[int] = []
    numel = 1
    for size in reversed(shape):
        if size < 0:
            raise OptionError(f"boxes: every dim of a shape is at least 0, got {shape}")
        strides.append(numel)
        numel *= size
    strides.reverse()
    if interval.stop > numel:
        raise OptionError(f"boxes: {interval} reaches beyond the {numel} elements of shape {shape}")
    if interval.is_empty:
        return ()
    if not shape:
        return (Box((), (), interval),)

    found: list[Box] = []
    position = interval.start
    while position < interval.stop:
        left = interval.stop - position
        dim = next(d for d, stride in enumerate(strides) if position % stride == 0 and stride <= left)
        index = [position // stride % size for stride, size in zip(strides, shape, strict=True)]
        count = min(left // strides[dim], shape[dim] - index[dim])
        covered = Interval(position, position + count * strides[dim])
        found.append(Box(tuple(index), (1,) * dim + (count,) + shape[dim + 1 :], covered))
        position = covered.stop
    return tuple(found)
