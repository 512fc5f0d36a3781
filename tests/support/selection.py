"""Selects a few combinations of a test's parameters that contain every value at least once."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

# In the environment of worker ranks, where --all-combinations was given.
ALL_COMBINATIONS = "FSDP_FLAT_TESTS_ALL_COMBINATIONS"
Each = TypeVar("Each")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect combinations of slow tests as long as every value of every parameter still occurs.

    Tests on worker ranks or on the fake accelerator are slow. ``--all-combinations`` selects everything.

    Args:
        config: pytest's configuration, to which the deselected items are reported.
        items: the collected tests; changed in place.
    """
    if config.getoption("--all-combinations"):
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for same in tests.values():
        if len(same) > 1 and _is_slow(same[0]):
            chosen = cover([item.callspec.params for item in same])  # type: ignore[attr-defined]
            left_out.update(item for index, item in enumerate(same) if index not in chosen)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def some(combinations: Iterable[Each], every: int) -> list[Each]:
    """Return every so manieth combination that a test's body tries; all of them with ``--all-combinations``.

    Args:
        combinations: such as a product of several values.
        every: without a common factor with the numbers of values, so that each value occurs.
    """
    return list(combinations)[:: 1 if ALL_COMBINATIONS in os.environ else every]


def cover(combinations: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the indices of combinations that together contain every value of every parameter.

    Greedily chooses the combination with the most missing values, the first one on a tie, so that the choice is the
    same in every run.
    """
    # Values may be of any type; equal values of one parameter are one object, or a small int or string.
    values = [{(name, id(value)) for name, value in combination.items()} for combination in combinations]
    missing = set().union(*values)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(values)), key=lambda index: len(values[index] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen


def _is_slow(item: pytest.Item) -> bool:
    on_ranks = "ranks" in getattr(item, "fixturenames", ())
    return hasattr(item, "callspec") and (on_ranks or "rehearsal" in item.path.parts)
