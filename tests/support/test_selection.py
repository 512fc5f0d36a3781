"""The selections of combinations: which values each contains, and that it is the same in every run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from fsdp_flat import ShardingStrategy
from tests.support.beside import APPLY
from tests.support.both_sides import Layout
from tests.support.selection import SIZE, cover, one, some

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def test_every_value_of_every_parameter_occurs_in_as_few_combinations_as_the_longest_has() -> None:
    names = ("strategy", "use_orig_params", "num_ranks")
    product = [dict(zip(names, values, strict=True)) for values in itertools.product(STRATEGIES, [False, True], [2, 4])]
    chosen = [product[index] for index in cover(product)]
    assert len(chosen) == 3
    for name in names:
        assert {combination[name] for combination in chosen} == {combination[name] for combination in product}


def test_a_test_of_one_parameter_keeps_all_of_its_values() -> None:
    assert cover([{"strategy": strategy} for strategy in STRATEGIES]) == {0, 1, 2}


def test_the_choice_is_the_same_in_every_run() -> None:
    combinations = [{"a": a, "b": b} for a, b in itertools.product("xyz", "pq")]
    assert cover(combinations) == cover([dict(combination) for combination in combinations])


def test_one_combination_stands_for_a_test_and_over_many_names_each_of_the_covering_ones_does() -> None:
    combinations = [{"front": front, "num_ranks": 2} for front in "abc"]
    chosen = [one(f"test_{number}", combinations, [0, 2]) for number in range(50)]
    assert chosen == [one(f"test_{number}", combinations, [2, 0]) for number in range(50)]
    assert set(chosen) == {0, 2}


@pytest.mark.parametrize("strategy", ["NO_SHARD", Layout("HYBRID_SHARD", (2, 2))])
def test_a_test_runs_on_two_ranks_where_it_can_unless_its_strategy_has_two_dimensions(strategy: Any) -> None:
    options: list[Any] = ["a", "b"]
    product = [{"num_ranks": number, "strategy": strategy, "option": option} for number in (2, 4) for option in options]
    ranks = Counter(product[one(f"test_{number}", product, range(4))]["num_ranks"] for number in range(50))
    assert ranks.keys() == ({2} if strategy == "NO_SHARD" else {2, 4})
    on_four = [each for each in product if each["num_ranks"] == 4]
    assert {one(f"test_{number}", on_four, range(2)) for number in range(50)} == {0, 1}


class Counted:
    """Counts in which tests of a session each front, strategy, dtype and number of ranks occurs, and prints it."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        counts: dict[str, Counter[str]] = {"front": Counter(), "strategy": Counter(), "dtype": Counter()}
        counts["ranks"] = Counter()
        for item in session.items:
            for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
                if name in ("front", "fronts"):
                    counts["front"].update({value} & APPLY.keys() if isinstance(value, str) else value)
                if name in ("strategy", "layout"):
                    words = str(value).replace("ShardingStrategy.", "").split()
                    counts["strategy"].update(words[:1] if words and words[0] in ShardingStrategy.__members__ else [])
                if isinstance(value, torch.dtype):
                    counts["dtype"][str(value)] += 1
                if name == "num_ranks":
                    counts["ranks"][str(value)] += 1
        print("counted", json.dumps(counts))


def counted(size: str) -> dict[str, dict[str, int]]:
    """Collect a size of the suite in a process of its own, and return its counts."""
    program = (
        "import sys, pytest; from tests.support.test_selection import Counted; from tests.__main__ import APART; "
        "sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', *sys.argv[1:], 'tests', "
        "*(f'--ignore={path}' for path in APART)], plugins=[Counted()]))"
    )
    done = subprocess.run([sys.executable, "-c", program, "--size", size], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("counted ")).split(" ", 1)[1])


@pytest.mark.from_size("cover", "collects the whole suite twice")
def test_every_front_strategy_dtype_and_number_of_ranks_of_the_suite_occurs_in_the_quick_one() -> None:
    quick, every = counted("quick"), counted("all")
    for what, values in every.items():
        assert values, what
        assert quick[what].keys() == values.keys(), f"{what}: {values.keys() - quick[what].keys()}"
    # The usual ones occur in several tests, so that none depends on one.
    for what, usual in {
        "front": ("flat", "originals", "fully_shard"),
        "strategy": tuple(ShardingStrategy.__members__),
        "ranks": ("2", "4"),
    }.items():
        assert {value: count for value in usual if (count := quick[what].get(value, 0)) < 5} == {}, quick[what]


def test_some_combinations_of_a_body_have_every_value_and_all_are_there_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = list(itertools.product(range(5), range(5), range(4)))
    monkeypatch.setenv(SIZE, "cover")
    chosen = some(product, 7)
    assert len(chosen) == 15
    assert [len({each[position] for each in chosen}) for position in range(3)] == [5, 5, 4]
    monkeypatch.setenv(SIZE, "quick")
    assert some(product, 7) == [product[24], product[73]]
    monkeypatch.setenv(SIZE, "all")
    assert some(product, 7) == product
