"""The selection of combinations contains every value, and is the same in every run."""

from __future__ import annotations

import itertools

import pytest

from tests.support.selection import ALL_COMBINATIONS, cover, some

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


def test_some_combinations_of_a_body_have_every_value_and_all_are_there_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = list(itertools.product(range(5), range(5), range(4)))
    monkeypatch.delenv(ALL_COMBINATIONS, raising=False)
    chosen = some(product, 7)
    assert len(chosen) == 15
    assert [len({each[position] for each in chosen}) for position in range(3)] == [5, 5, 4]
    monkeypatch.setenv(ALL_COMBINATIONS, "1")
    assert some(product, 7) == product
