"""The selection of combinations contains every value, and is the same in every run."""

from __future__ import annotations

import itertools

from tests.support.selection import cover

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
