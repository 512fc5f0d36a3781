"""Selects the combinations of a test's parameters that a size of the suite runs: one, each value once, or all."""

from __future__ import annotations

import argparse
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

# Of the suite: one combination of a test function, every value of its parameters at least once, all combinations.
SIZES = ("quick", "cover", "all")
# The variable of the environment with the size, for worker ranks.
SIZE = "FSDP_FLAT_TESTS_SIZE"
# The variable of the environment with which tests run without guards, but for those marked as tests of guards.
NO_GUARDS = "FSDP_FLAT_TESTS_WITHOUT_GUARDS"
# The number of ranks on which the quick suite runs a test that may run on more.
FEW_RANKS = 2
# How many times fewer combinations a body tries in the quick suite: no common factor with usual numbers of values.
FEWER = 7
MARKS = (
    "from_size(size, why): the smallest size of the suite that runs the test, cover or all; by default quick",
    "of_guards: a guard raises or warns in the test, which is left out where tests run without guards",
    "every_value_in_quick(why): the quick suite too runs every value of the test's parameters",
)
Each = TypeVar("Each")


def size_in(arguments: Sequence[str]) -> str:
    """Return the size of the suite that options of pytest ask for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="cover")
    size: str = parser.parse_known_args(arguments)[0].size
    return size


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the combinations that the size of the suite leaves out, and tests of a larger size or of absent guards.

    ``all`` runs everything. ``cover`` leaves out combinations of slow tests, which are those on worker ranks or on the
    fake accelerator, as long as every value of every parameter still occurs. ``quick`` runs one of these of each test
    function, on two ranks where it can. ``--listed`` keeps those of the size that a file has.

    Args:
        config: pytest's configuration, to which the deselected items are reported.
        items: the collected tests; changed in place.
    """
    size = SIZES.index(config.getoption("--size"))
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for same in tests.values():
        of_absent = bool(os.environ.get(NO_GUARDS)) and same[0].get_closest_marker("of_guards")
        if size >= _smallest_size(same[0]) and not of_absent:
            kept.update(same[index] for index in _chosen(same, SIZES[size]))
    if config.getoption("--listed"):
        listed = set(Path(config.getoption("--listed")).read_text().splitlines())
        kept = {item for item in kept if item.nodeid in listed}
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def _smallest_size(item: pytest.Item) -> int:
    mark = item.get_closest_marker("from_size")
    return SIZES.index(mark.args[0]) if mark else 0


def _chosen(same: Sequence[pytest.Item], size: str) -> set[int]:
    """Return the indices of the combinations of one test function that a size of the suite runs."""
    every = set(range(len(same)))
    if size == "all" or len(same) == 1:
        return every
    combinations = [item.callspec.params for item in same]  # type: ignore[attr-defined]
    covering = cover(combinations) if _is_slow(same[0]) else every
    if size == "cover" or same[0].get_closest_marker("every_value_in_quick"):
        return covering
    return {one(same[0].originalname, combinations, covering)}  # type: ignore[attr-defined]


def one(name: str, combinations: Sequence[Mapping[str, Any]], covering: Iterable[int]) -> int:
    """Return the index of the combination that stands for a test: any of the covering ones, by a hash of its name.

    A test runs on two ranks if it has the same combination for more ranks and for two, unless that is a hybrid
    strategy, whose replicas and shards are two ranks each only if there are four.
    """
    ordered = sorted(covering)
    index = ordered[zlib.crc32(name.encode()) % len(ordered)]
    chosen = combinations[index]
    if chosen.get("num_ranks", 0) > FEW_RANKS and not any("HYBRID" in str(value) for value in chosen.values()):
        on_few = {**chosen, "num_ranks": FEW_RANKS}
        # By identity, as in cover: values may be tensors, which do not compare to a truth value.
        same = [
            other
            for other, values in enumerate(combinations)
            if values.keys() == on_few.keys() and all(values[key] is value for key, value in on_few.items())
        ]
        return same[0] if same else index
    return index


def some(combinations: Iterable[Each], every: int) -> list[Each]:
    """Return every so manieth combination that a test's body tries; all in ``make test-all``, fewer in ``make test``.

    Args:
        combinations: such as a product of several values.
        every: without a common factor with the numbers of values, so that each value occurs.
    """
    size, every_one = os.environ.get(SIZE, "cover"), list(combinations)
    if size == "quick":
        # Not from the first one on, which has the plainest values.
        return every_one[min(FEWER * every, len(every_one)) // 2 :: FEWER * every]
    return every_one[:: every if size == "cover" else 1]


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
