"""The fuzzer itself, and some of its seeds; ``make fuzz`` runs more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import on_ranks
from tests.support.pool import WarmPools

from .actions import ACTIONS
from .case import Action, Case, Node, Options, Rows, from_json, nodes_of, to_json
from .generate import case_from
from .models import CLASSES
from .running import Failure, Fuzzer
from .script import script_of
from .shrink import shrink

NUM_SEEDS = 12

ALL = [[0], [0]]
TRAIN = Action(kind="train", seed=1, args={"uses": ALL, "set_to_none": True})


def small_case(*actions: Action, **changes: Any) -> Case:
    """Make a case of two layers."""
    body = Node(kind="seq", id=1, children=(Node(kind="linear", id=2), Node(kind="mlp", id=3)))
    case = replace(
        case_from(0, 2, "wrapper"),
        width=3,
        model=Node(kind="root", id=0, children=(body,)),
        options=Options(),
        actions=actions,
        compares_by="summon",
        rows=None,
    )
    return replace(case, wrapping=replace(case.wrapping, policy="custom", ids=(3,), strategies=()), **changes)


@pytest.fixture
def fuzzer(warm_pools: WarmPools) -> Iterator[Callable[..., Fuzzer]]:
    """Fuzzers on the session's warm ranks."""
    made: list[Fuzzer] = []

    def make(num_ranks: int, **arguments: Any) -> Fuzzer:
        made.append(Fuzzer(num_ranks, pools=warm_pools, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


@pytest.fixture(scope="module")
def without_shared_memory() -> Iterator[Callable[[int], Fuzzer]]:
    """Fuzzers on ranks of their own: those of the session have connected their shared memory already."""
    made: dict[int, Fuzzer] = {}

    def of_size(num_ranks: int) -> Fuzzer:
        if num_ranks not in made:
            made[num_ranks] = Fuzzer(num_ranks, shared_memory=False, timeout_s=15.0)
        return made[num_ranks]

    yield of_size
    for one in made.values():
        one.__exit__()


def check(case: Case, fuzzer: Fuzzer) -> None:
    """Fail with the script of the case if it fails."""
    __tracebackhide__ = True
    failure = fuzzer.run(case)
    if failure is not None:
        pytest.fail(f"{script_of(case, failure, shared_memory=fuzzer.shared_memory)}\n{failure.text}", pytrace=False)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_seed_ends_clean(num_ranks: int, seed: int, fuzzer: Callable[..., Fuzzer]) -> None:
    check(case_from(seed, num_ranks), fuzzer(num_ranks, timeout_s=15.0))


@pytest.mark.parametrize("seed", range(NUM_SEEDS, 2 * NUM_SEEDS))
def test_a_seed_ends_clean_without_shared_memory(seed: int, without_shared_memory: Callable[[int], Fuzzer]) -> None:
    check(case_from(seed, 2), without_shared_memory(2))


# -- cases -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_seed_gives_the_same_case_on_every_rank(rank: int, num_ranks: int) -> None:
    import torch.distributed as dist

    texts: list[Any] = [None] * num_ranks
    dist.all_gather_object(texts, [to_json(case_from(seed, num_ranks)) for seed in range(20)])
    assert texts[0] == texts[1]


def test_seeds_cover_every_kind_of_part_action_and_option() -> None:
    cases = [case_from(seed, 4) for seed in range(400)]
    rows = [case.rows for case in cases if case.rows is not None]
    assert 100 < len(rows) < 300
    assert any(len(unit) > 1 for one in rows for unit in one.units)
    for feature in ("wrapped", "keeps", "frees", "last_dim", "wrapper_root"):
        assert any(getattr(one, feature) for one in rows), feature
    assert {node.kind for case in cases for node in nodes_of(case.model)} == {*CLASSES, "alias"}
    assert {action.kind for case in cases for action in case.actions} == set(ACTIONS)
    assert len({case.wrapping.policy for case in cases}) == 8
    assert len({case.options.strategy for case in cases}) == 5
    assert {case.options.mesh for case in cases} == {(), (4,), (1, 4), (2, 2), (4, 1)}
    assert {node.reentrant for case in cases for node in nodes_of(case.model) if node.kind == "recompute"} == {
        False,
        True,
    }


# -- finding, shrinking, watching --------------------------------------------------------------------------------------

FORWARD = Action(kind="forward", args={"input_grad": False})
BACKWARD = Action(kind="backward", args={"which": 0, "all": False, "retain": False, "uses": ALL})


def test_a_backward_after_one_that_kept_its_graph_and_reached_no_inputs(fuzzer: Callable[..., Fuzzer]) -> None:
    check(from_json((Path(__file__).parent / "found_kept_graph.json").read_text()), fuzzer(3))


@pytest.mark.parametrize("rows", [None, Rows(units=((2, 3),))])
@pytest.mark.parametrize("keep", [False, True])
def test_a_replica_runs_forwards_alone(keep: bool, rows: Rows | None, fuzzer: Callable[..., Fuzzer]) -> None:
    args = {"replica": 1, "count": 2, "train": True, "grad": True, "keep": keep}
    alone = Action(kind="alone", args=args)
    options = Options(strategy="HYBRID_SHARD", mesh=(2, 1))
    check(small_case(TRAIN, alone, FORWARD, alone, BACKWARD, TRAIN, options=options, rows=rows), fuzzer(2))


@pytest.mark.parametrize("compares_by", ["summon", "slices"])
@pytest.mark.parametrize(
    "plant, actions, kind",
    [
        ("scaled gradient", (TRAIN,), "different gradients"),
        ("lost reductions", (FORWARD, BACKWARD), "different gradients"),
        ("lost step", (TRAIN,), "different parameters"),
        ("lost optimizer state", (TRAIN,), "different optimizer state"),
        ("error on one rank", (FORWARD,), "some ranks raised"),
    ],
)
def test_a_planted_defect_is_found(
    plant: str, actions: tuple[Action, ...], kind: str, compares_by: str, fuzzer: Callable[..., Fuzzer]
) -> None:
    case = small_case(*actions, compares_by=compares_by)
    if plant == "lost reductions" and compares_by == "summon":
        kind = "are not reduced yet"  # the library refuses to show such gradients, ahead of the comparison
    failure = fuzzer(2, plant=plant).run(case)
    assert failure is not None
    assert kind in failure.kind, failure.text


def test_a_hang_is_ended_and_reported_with_the_stack_of_each_rank(fuzzer: Callable[..., Fuzzer]) -> None:
    hanging = fuzzer(2, plant="hang")
    assert hanging.run(small_case()) is None  # the ranks have started and imported what a case needs
    failure = hanging.run(small_case(FORWARD), timeout_s=4)
    assert failure is not None
    assert failure.kind == "hang"
    assert "time.sleep(3600)" in failure.text
    assert "--- rank 1 ---" in failure.text
    assert fuzzer(2).run(small_case(FORWARD)) is None


class FailsWithClip:
    """Stands for ranks on which every program with ``clip`` fails, and counts its runs."""

    num_runs = 0

    def run(self, case: Case, *, timeout_s: float | None = None) -> Failure | None:
        self.num_runs += 1
        if any(action.kind == "clip" for action in case.actions):
            return Failure("clip", "")
        return Failure("other", "") if len(case.actions) == 1 else None


def test_shrinking_keeps_what_the_failure_needs_and_nothing_else() -> None:
    runner = FailsWithClip()
    seeds = [seed for seed in range(90) if any(a.kind == "clip" for a in case_from(seed, 2).actions)]
    for seed in seeds[:5]:
        small, failure = shrink(case_from(seed, 2), Failure("clip", ""), runner)
        assert failure.kind == "clip"
        assert [action.kind for action in small.actions] == ["clip"]
        assert len(list(nodes_of(small.model))) <= 3
        assert small.options == Options()
        assert small.wrapping.policy == "none"
        assert small.rows in (None, Rows())


def test_the_command_replays_a_file(tmp_path: Path, capsys: Any) -> None:
    from .__main__ import main

    path = tmp_path / "case.json"
    path.write_text(to_json(small_case(TRAIN)))
    assert main(["--case", str(path), "--shared-memory"]) == 0
    assert main(["--case", str(path), "--shared-memory", "--plant", "scaled gradient"]) == 1
    assert "different gradients" in capsys.readouterr().out
