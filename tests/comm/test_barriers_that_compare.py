"""A barrier tells every rank whether all ranks have said the same."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp_flat.comm import RankGroup, agreement, barrier, enter
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.patience import LATE_S, alone_after


def world() -> RankGroup:
    assert dist.group.WORLD is not None
    return RankGroup.of(dist.group.WORLD)


@on_ranks(2, 4)
def test_ranks_that_say_the_same_know_it_after_the_barrier(rank: int) -> None:
    for said in ("the same", "", "the same again"):
        assert barrier("a test", world(), said)


@on_ranks(2, 4)
def test_ranks_that_say_something_else_all_know_it_after_the_barrier(rank: int) -> None:
    assert not barrier("a test", world(), f"of rank {rank}")
    assert not barrier("a test", world(), "something else" if rank == 1 else "the same")
    assert barrier("a test", world(), "the same")


def test_what_a_rank_has_said_does_not_count_once_it_has_left_the_barrier() -> None:
    def arrival(rank: int, said: str) -> agreement._StoreBarrier:
        return agreement._StoreBarrier(RankGroup(mock.Mock(), rank, 3), said)

    with mock.patch.object(agreement, "group_store", return_value=dist.HashStore()):
        first, second = arrival(0, "the same"), arrival(1, "something else")
        assert second.leave()
        arrivals = [arrival(1, "the same"), arrival(2, "the same")]
        assert first.poll(0)
    assert [each.is_unanimous for each in (first, arrivals[-1])] == [True, True]


def test_a_later_barrier_does_not_know_what_was_said_in_an_earlier_one() -> None:
    store = dist.HashStore()
    with mock.patch.object(agreement, "group_store", return_value=store):
        for said in ("one", "two", "three"):
            arrivals = [agreement._StoreBarrier(RankGroup(mock.Mock(), rank, 2), said) for rank in range(2)]
            assert arrivals[-1].is_complete
            assert arrivals[-1].is_unanimous
    assert store.num_keys() < 8  # two counters of ranks, and at most two barriers with what was said in them


@on_ranks(2, 4)
def test_a_rank_that_has_entered_may_work_longer_than_a_rank_is_waited_for(rank: int) -> None:
    with alone_after(0.2):
        enter(world())
        dist.barrier()
        time.sleep(2 * LATE_S if rank else 0)
        assert barrier("a test", world(), "the same", is_entered=True)


@on_ranks(2)
def test_a_rank_that_has_not_entered_is_still_found(rank: int) -> None:
    if rank == 0:
        enter(world())
        with alone_after(0.2), pytest.raises(UsageError, match=r"rank\(s\) \[1\] have not called it"):
            barrier("a test", world(), "the same", is_entered=True)
    dist.barrier()
    for _ in range(2):
        enter(world())
        barrier("a test", world(), "the same", is_entered=True)
