"""Interval against Python's own ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_flat.layout import Interval


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    start = draw(st.integers(0, 12))
    return Interval(start, start + draw(st.integers(0, 12)))


def elements(interval: Interval) -> list[int]:
    return list(range(interval.start, interval.stop))


@given(intervals())
def test_an_interval_counts_its_elements(interval: Interval) -> None:
    assert interval.numel == len(elements(interval))
    assert interval.is_empty == (not elements(interval))


@given(intervals(), intervals())
def test_intersect_holds_the_elements_of_both(one: Interval, other: Interval) -> None:
    both = one.intersect(other)
    assert set(elements(both)) == set(elements(one)) & set(elements(other))
    assert one.start <= both.start
    assert both.stop <= one.stop


@given(intervals(), st.integers(0, 9))
def test_shift_moves_every_element_and_back(interval: Interval, by: int) -> None:
    assert elements(interval.shift(by)) == [element + by for element in elements(interval)]
    assert interval.shift(by).shift(-by) == interval
