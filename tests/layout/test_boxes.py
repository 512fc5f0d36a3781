"""Boxes against enumeration of every element, and against the least number that exists."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest

from fsdp_flat.layout import Box, Interval, boxes


def flat_indices(shape: tuple[int, ...], box: Box) -> list[int]:
    """The flat indices of a box's elements, in the order in which they lie in the box."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    for dim_range, size in zip(ranges, shape, strict=True):
        assert dim_range.stop <= size
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*ranges)]


def check(shape: tuple[int, ...], interval: Interval) -> None:
    found = boxes(shape, interval)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    position = interval.start
    for box in found:
        assert box.interval.start == position
        assert not box.interval.is_empty
        assert flat_indices(shape, box) == list(range(box.interval.start, box.interval.stop))
        position = box.interval.stop
    assert position == interval.stop


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (3, 1, 4), (2, 3, 4), (3, 3, 3), (2, 1, 2, 3)]
)
def test_every_interval_of_a_small_shape_is_split_rightly(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            check(shape, Interval(start, stop))


@pytest.mark.parametrize("shape", [(6,), (3, 4), (3, 1, 3), (3, 3, 3)])
def test_no_split_needs_fewer_boxes(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    blocks: set[tuple[int, int]] = set()
    for corner in itertools.product(*[[(o, s) for o in range(n) for s in range(1, n - o + 1)] for n in shape]):
        offsets, sizes = tuple(o for o, _ in corner), tuple(s for _, s in corner)
        covered = flat_indices(shape, Box(offsets, sizes, Interval(0, math.prod(sizes))))
        if covered == list(range(covered[0], covered[0] + len(covered))):
            blocks.add((covered[0], covered[-1] + 1))

    @cache
    def least(start: int, stop: int) -> int:
        if start == stop:
            return 0
        return 1 + min(least(end, stop) for end in range(start + 1, stop + 1) if (start, end) in blocks)

    for start in range(numel):
        for stop in range(start + 1, numel + 1):
            assert len(boxes(shape, Interval(start, stop))) == least(start, stop)
