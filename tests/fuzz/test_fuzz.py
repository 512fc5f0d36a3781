"""The fuzzer itself, and some of its seeds; ``make fuzz`` runs more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import on_ranks
from tests.support.pool import WarmPools

from .actions import ACTIONS
from .case import Action, Case, Node, Options, Rows, from_json, nodes_of, to_json
from .features import FEATURES, without
from .generate import case_from
from .models import CLASSES, build
from .rows import fitted
from .running import Failure, Fuzzer, plain_words
from .script import script_of
from .shrink import repaired, shrink, smaller_cases

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


def test_a_case_comes_back_from_json() -> None:
    for seed in range(100):
        case = case_from(seed, 3)
        assert json.loads(to_json(from_json(to_json(case)))) == json.loads(to_json(case))


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


def test_units_of_fully_shard_hold_all_places_of_their_parameters() -> None:
    body = Node(kind="seq", id=1, children=(Node(kind="mlp", id=2), Node(kind="linear", id=3)))
    tied = Node(kind="tied", id=4, refers=2)
    case = small_case(model=Node(kind="root", id=0, children=(body, tied)))
    assert fitted(replace(case, rows=Rows(units=((2, 3), (4,), (9,))))).units == ()
    assert fitted(replace(case, rows=Rows(units=((3,),), keeps=(3,)))) == Rows(units=((3,),), keeps=(3,))


def test_aliases_and_ties_refer_to_nodes_before_them() -> None:
    for seed in range(200):
        case = case_from(seed, 2)
        assert repaired(case.model) == case.model
        build(case)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_can_be_left_out(name: str) -> None:
    case = without(case_from(5, 2), [name])
    assert from_json(to_json(case)).seed == 5


# -- finding, shrinking, watching --------------------------------------------------------------------------------------

CLIP = Action(kind="clip", args={"norm": 2.0, "max": 0.01})
FORWARD = Action(kind="forward", args={"input_grad": False})
BACKWARD = Action(kind="backward", args={"which": 0, "all": False, "retain": False, "uses": ALL})


def test_a_small_case_is_clean(fuzzer: Callable[..., Fuzzer]) -> None:
    check(small_case(TRAIN, FORWARD, BACKWARD, CLIP, TRAIN), fuzzer(2))


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
        ("lost clip", (FORWARD, BACKWARD, CLIP), "different clipped gradients"),
        ("lost reductions", (FORWARD, BACKWARD), "different gradients"),
        ("changed output", (FORWARD,), "different outputs"),
        ("lost step", (TRAIN,), "different parameters"),
        ("lost optimizer state", (TRAIN,), "different optimizer state"),
        ("changed buffer", (FORWARD,), "different buffers"),
        ("error on one rank", (FORWARD,), "some ranks raised"),
    ],
)
def test_a_planted_defect_is_found(
    plant: str, actions: tuple[Action, ...], kind: str, compares_by: str, fuzzer: Callable[..., Fuzzer]
) -> None:
    case = small_case(*actions, compares_by=compares_by)
    if plant == "changed buffer":
        case = replace(case, model=Node(kind="root", id=0, children=(Node(kind="counter", id=1),)))
    if plant == "lost reductions" and compares_by == "summon":
        kind = "are not reduced yet"  # the library refuses to show such gradients, ahead of the comparison
    failure = fuzzer(2, plant=plant).run(case)
    assert failure is not None
    assert kind in failure.kind, failure.text


@pytest.mark.parametrize("compares_by", ["summon", "slices"])
@pytest.mark.parametrize(
    "plant, actions, kind", [("scaled gradient", (TRAIN,), "different gradients"), ("lost step", (TRAIN,), "different")]
)
def test_a_planted_defect_is_found_in_a_model_of_fully_shard(
    plant: str, actions: tuple[Action, ...], kind: str, compares_by: str, fuzzer: Callable[..., Fuzzer]
) -> None:
    # The first defect is one of the wrapper's, here around a part.
    rows = Rows(wrapped=(3,)) if plant == "scaled gradient" else Rows(units=((2, 3),))
    failure = fuzzer(2, plant=plant).run(small_case(*actions, compares_by=compares_by, rows=rows))
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


def test_smaller_cases_are_other_cases_and_can_be_built() -> None:
    for seed in range(4):
        case = case_from(seed, 3)
        for smaller in smaller_cases(case):
            assert smaller != case
            build(smaller)


def test_kinds_of_failures_leave_out_what_depends_on_the_case() -> None:
    texts = ["unit 'c0.c1' has 3 of 7 elements", "unit 'c4' has 11 of 12 elements"]
    assert len({plain_words(text) for text in texts}) == 1


def test_a_script_runs_by_itself(tmp_path: Path) -> None:
    case = small_case(TRAIN)
    path = tmp_path / "failing.py"
    path.write_text(script_of(case, Failure("kind", "text"), shared_memory=True))
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=root, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # gloo reports its connections in torch 2.8.
    assert [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")] == ["clean"]


def test_the_command_replays_a_file(tmp_path: Path, capsys: Any) -> None:
    from .__main__ import main

    path = tmp_path / "case.json"
    path.write_text(to_json(small_case(TRAIN)))
    assert main(["--case", str(path), "--shared-memory"]) == 0
    assert main(["--case", str(path), "--shared-memory", "--plant", "scaled gradient"]) == 1
    assert "different gradients" in capsys.readouterr().out
