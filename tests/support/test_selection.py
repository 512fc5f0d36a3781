"""The selections of combinations: which values each contains, and that it is the same in every run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fsdp_flat import ShardingStrategy
from fsdp_flat.core import guards_in_use
from tests.support.beside import APPLY
from tests.support.rank_tests import chosen_guards
from tests.support.selection import NO_GUARDS, cover, select

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def test_every_value_of_every_parameter_occurs_in_as_few_combinations_as_the_longest_has() -> None:
    names = ("strategy", "use_orig_params", "num_ranks")
    product = [dict(zip(names, values, strict=True)) for values in itertools.product(STRATEGIES, [False, True], [2, 4])]
    chosen = [product[index] for index in cover(product)]
    assert len(chosen) == 3
    for name in names:
        assert {combination[name] for combination in chosen} == {combination[name] for combination in product}


class Options:
    """Stands for pytest's configuration, with a size of the suite."""

    def __init__(self, size: str) -> None:
        self.deselected: list[pytest.Item] = []
        self.hook = SimpleNamespace(pytest_deselected=lambda items: self.deselected.extend(items))
        self.getoption = {"--size": size}.get


class Counted:
    """Counts in how many tests of two sizes each front, strategy, dtype and number of ranks occurs, and prints it."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        quick = list(session.items)
        select(Options("quick"), quick)  # type: ignore[arg-type]
        print("counted", json.dumps([counts_of(quick), counts_of(session.items)]))


def counts_of(items: list[pytest.Item]) -> dict[str, Counter[str]]:
    """Count in which tests each front, strategy, dtype and number of ranks occurs."""
    counts: dict[str, Counter[str]] = {"front": Counter(), "strategy": Counter(), "dtype": Counter()}
    counts["ranks"] = Counter()
    for item in items:
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
    return counts


@pytest.mark.from_size("cover", "collects the whole suite")
def test_every_front_strategy_dtype_and_number_of_ranks_of_the_suite_occurs_in_the_quick_one() -> None:
    program = (
        "import sys, pytest; from tests.support.test_selection import Counted; from tests.__main__ import APART; "
        "sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', '--size=all', 'tests', "
        "*(f'--ignore={path}' for path in APART)], plugins=[Counted()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("counted "))
    quick, every = json.loads(line.split(" ", 1)[1])
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


@pytest.mark.of_guards
def test_without_guards_none_is_on_and_tests_of_guards_are_left_out(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Options("all")
    others = [item for item in request.session.items if not any(item.iter_markers())]
    with_guards = [*others, request.node]
    select(config, with_guards)
    monkeypatch.setenv(NO_GUARDS, "1")
    without = [*others, request.node]
    select(config, without)
    assert with_guards == [*others, request.node]
    assert (without, config.deselected) == (others, [request.node])
    assert guards_in_use()
    with chosen_guards():
        assert not guards_in_use()
    assert guards_in_use()
