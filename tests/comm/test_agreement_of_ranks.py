"""Ranks agree, or fail together with the text of the first rank that failed or differs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    agree,
    agreement,
    exchange_if_different,
    failures,
    find_disagreement,
    true_on_any_rank,
)
from fsdp_flat.comm.failures import report_failure
from fsdp_flat.comm.torch_comm import group_store
from fsdp_flat.errors import OptionError, PeerFailureError, RankMismatchError
from tests.support import on_ranks
from tests.support.patience import impatient, tell, wait_until

TEXTS = ErrorTexts("counting", "Ranks count differently.", "Count alike.")


def world() -> RankGroup:
    return RankGroup.of(dist.group.WORLD)


def mesh_groups(rank: int) -> list[RankGroup]:
    """The rows and the columns of a mesh of two by two ranks."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return [RankGroup.of(rows[rank // 2]), RankGroup.of(columns[rank % 2])]


@on_ranks(2, 4)
def test_equal_payloads_are_not_sent_and_different_ones_come_in_rank_order(rank: int, num_ranks: int) -> None:
    assert exchange_if_different(b"the same", world()) is None
    payload = b"x" * rank
    assert exchange_if_different(payload, world()) == [b"x" * each for each in range(num_ranks)]
    assert exchange_if_different(b"alone", RankGroup(None, 0, 1)) is None


@on_ranks(4)
def test_a_flag_of_any_rank_of_a_mesh_is_true_on_all(rank: int) -> None:
    groups = mesh_groups(rank)
    for odd in range(4):
        assert true_on_any_rank([rank == odd, False, True], groups) == [True, False, True]
    assert true_on_any_rank([], groups) == []


@on_ranks(2)
def test_texts_after_a_tab_are_not_compared_and_are_those_of_the_error(rank: int) -> None:
    agree(["one\tof this rank", f"two\tof rank {rank}"], None, [world()], TEXTS)
    with pytest.raises(RankMismatchError, match="rank 0 of the group has the 2 of 0, rank 1 has the 3 of 1"):
        agree([f"one\tof rank {rank}", f"{rank}\tthe {2 + rank} of {rank}"], None, [world()], TEXTS)


@on_ranks(4)
@pytest.mark.parametrize("odd", [0, 3])
def test_a_difference_on_one_rank_of_a_mesh_is_an_error_of_all_with_one_text(odd: int, rank: int) -> None:
    lines = ["one", "two", *(["three"] if rank == odd else [])]
    with pytest.raises(RankMismatchError) as caught:
        agree(lines, None, mesh_groups(rank), TEXTS)
    text = str(caught.value)
    assert text.startswith("Ranks count differently. First difference: rank 0 of the group has")
    assert "nothing more" in text
    assert "three" in text
    assert text.endswith("Count alike.")


@on_ranks(4)
@pytest.mark.parametrize("odd", [0, 3])
def test_an_error_on_one_rank_of_a_mesh_is_its_own_there_and_told_to_the_others(odd: int, rank: int) -> None:
    error = OptionError("no such number") if rank == odd else None
    with pytest.raises(OptionError if rank == odd else PeerFailureError) as caught:
        agree(["one"], error, mesh_groups(rank), TEXTS)
    if rank == odd:
        assert caught.value is error
    else:
        assert "failed while counting, so this rank stops too: OptionError: no such number" in str(caught.value)


@on_ranks(2)
def test_errors_of_all_ranks_stay_their_own_and_agreeing_ranks_have_none(rank: int) -> None:
    error = OptionError(f"error {rank}")
    assert find_disagreement([], error, [world()], TEXTS) is error
    assert find_disagreement(["one"], None, [world()], TEXTS) is None


@on_ranks(2, timeout=50)
def test_ranks_agree_also_if_one_has_failed_before_and_comes_late(rank: int) -> None:
    rank_group = RankGroup.of(dist.new_group(timeout=timedelta(seconds=40)))
    if rank == 1:
        # The caller has caught the error, and goes on.
        report_failure(rank_group, "raised ValueError: an odd batch")
    dist.barrier()
    looks, told = failures.will_not_come, []

    def look(*args: Any, **options: Any) -> bool:
        found = looks(*args, **options)
        if not told:
            tell("rank 0 has looked for failures")
            told.append(True)
        return found

    if rank == 1:
        wait_until("rank 0 has looked for failures")
    with impatient(), mock.patch.object(failures, "will_not_come", look if rank == 0 else looks):
        payloads = exchange_if_different(b"of rank %d" % rank, rank_group)
        assert payloads == [b"of rank 0", b"of rank 1"]
        assert find_disagreement(["one"], None, [rank_group], TEXTS) is None
    dist.barrier()


def test_failures_in_a_destroyed_group_do_not_count_in_the_next_group_of_its_name() -> None:
    names, found = set(), []
    for num_failures in (2, 0):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        names.add(group.group_name)
        for _ in range(num_failures):
            report_failure(RankGroup.of(group), "raised ValueError: old")
        group_store(group).set("fsdp_flat/failure/1", "1 0 raised KeyError: new")
        found.append(failures.has_failed(RankGroup.of(group), [1]))
        dist.destroy_process_group()
    assert len(names) == 1
    assert found == [False, True]


class InterleavedStore:
    """Runs ``meanwhile`` once, after the first request that withdraws an arrival."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.meanwhile: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        result = self._store.add(key, amount)
        if amount < 0 and self.meanwhile is not None:
            run, self.meanwhile = self.meanwhile, None
            run()
        return result


def test_ranks_that_leave_a_barrier_at_once_stay_if_the_last_rank_has_arrived() -> None:
    store = InterleavedStore()
    with mock.patch.object(agreement, "group_store", return_value=store):
        first, second, last = (agreement._StoreBarrier(RankGroup(mock.Mock(), rank, 3)) for rank in range(3))
    assert last.is_complete
    found = []
    store.meanwhile = lambda: found.append(second.leave())
    found.append(first.leave())
    assert found == [False, False]
    assert first.poll(0)
    assert first.missing() == []


def test_a_barrier_that_ranks_have_left_is_complete_once_all_have_come_back() -> None:
    store = InterleavedStore()
    with mock.patch.object(agreement, "group_store", return_value=store):
        early = [agreement._StoreBarrier(RankGroup(mock.Mock(), rank, 3)) for rank in range(2)]
        assert early[0].missing() == [2]
        assert [each.leave() for each in early] == [True, True]
        arrivals = [agreement._StoreBarrier(RankGroup(mock.Mock(), rank, 3)) for rank in (2, 0, 1)]
    assert [each.is_complete for each in arrivals] == [False, False, True]
    assert arrivals[0].poll(0)


@on_ranks(3)
def test_ranks_in_different_numbers_of_groups_agree_on_lines_of_each_group(rank: int) -> None:
    pair = dist.new_group([0, 1])
    groups = [world(), *([RankGroup.of(pair)] if rank < 2 else [])]
    agree(lambda group: [f"of {group.size} ranks"], None, groups, TEXTS)
    # What the pair alone finds is an error of the third rank too.
    with pytest.raises(RankMismatchError, match="Ranks count differently"):
        agree(lambda group: [f"of rank {rank if group.size == 2 else 0}"], None, groups, TEXTS)
    agree(lambda group: ["one"], None, groups, TEXTS)
