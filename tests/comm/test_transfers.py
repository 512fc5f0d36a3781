"""Transfers between ranks: long runs, short ones packed together, and several dtypes at once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_flat.comm import ALONE, P2PChannels, RankGroup, transfers
from fsdp_flat.comm.shm import transport_of
from fsdp_flat.layout import Interval, IrregularPartition, ReplicatedPartition, plan_transfer
from tests.support import assert_equal, on_ranks
from tests.support.steps import recorded, shared_memory

CPU = torch.device("cpu")


def even(numel: int, size: int) -> list[Interval]:
    return [Interval(numel * rank // size, numel * (rank + 1) // size) for rank in range(size)]


@on_ranks(2, 4)
@pytest.mark.parametrize("shared", [False, True])
def test_tensors_of_all_lengths_and_dtypes_arrive_whole_in_one_go(shared: bool, rank: int, num_ranks: int) -> None:
    rank_group = RankGroup.of(dist.group.WORLD)
    channels = P2PChannels()
    found = []
    for numel, dtype in (
        (5, torch.float32),
        (200_000, torch.float32),
        (7_000_000, torch.float64),
        (7, torch.int64),
        (0, torch.bool),
        (9, torch.bfloat16),
    ):
        whole = torch.arange(numel).to(dtype)
        held = even(numel, num_ranks)
        target = torch.empty(numel, dtype=dtype)
        transfer_plan = plan_transfer(
            IrregularPartition(tuple(held)), ReplicatedPartition(numel, None, num_ranks), rank
        )
        with shared_memory(shared):
            own = whole[held[rank].to_slice()].clone()
            channels.add(transfer_plan, own, target, rank_group=rank_group, device=CPU)
        found.append((target, whole))
    channels.wait()
    for target, whole in found:
        assert_equal(target, whole)
    channels.wait()


@on_ranks(2)
@pytest.mark.parametrize("shared", [False, True])
def test_short_runs_of_a_dtype_travel_in_one_message(shared: bool, rank: int) -> None:
    rank_group = RankGroup.of(dist.group.WORLD)
    channels = P2PChannels()
    transport_of(rank_group)  # connects the ranks
    with shared_memory(shared), recorded() as record:
        targets = [torch.empty(8) for _ in range(20)]
        for index, target in enumerate(targets):
            transfer_plan = plan_transfer(IrregularPartition(tuple(even(8, 2))), ReplicatedPartition(8, None, 2), rank)
            own = torch.full((4,), 10.0 * index + rank)
            channels.add(transfer_plan, own, target, rank_group=rank_group, device=CPU)
        channels.wait()
    assert record.counts() == ({"transfer": 1} if shared else {"batch_isend_irecv": 1})
    for index, target in enumerate(targets):
        assert target.tolist() == [10.0 * index] * 4 + [10.0 * index + 1] * 4


@on_ranks(4)
@pytest.mark.parametrize("shared", [False, True])
@mock.patch.object(transfers, "_MAX_IN_FLIGHT_NBYTES", 10_000)
def test_ranks_with_other_bytes_in_their_further_groups_send_the_same_messages(shared: bool, rank: int) -> None:
    """As experts of other sizes on each pair of ranks and on each rank, between units of all ranks."""
    pairs = [RankGroup.of(dist.new_group(ranks)) for ranks in ([0, 1], [2, 3])]
    channels = P2PChannels()
    found = []

    def add(rank_group: RankGroup, numel: int) -> None:
        size, whole = rank_group.size, torch.arange(numel) + 10 * len(found)
        held = even(numel, size)
        target = torch.full_like(whole, -1)
        plan = plan_transfer(IrregularPartition(tuple(held)), ReplicatedPartition(numel, None, size), rank_group.rank)
        own = whole[held[rank_group.rank].to_slice()]
        channels.add(plan, own, target, rank_group=rank_group, device=CPU, nbytes=whole.nbytes)
        found.append((target, whole))

    with shared_memory(shared):
        for _ in range(3):
            add(RankGroup.of(dist.group.WORLD), 8)
            add(pairs[rank // 2], [1200, 60][rank // 2])
            add(pairs[rank // 2], [40, 90_000][rank // 2])
            add(ALONE, [1240, 5, 700, 1][rank])
            add(RankGroup.of(dist.group.WORLD), 16)
        channels.wait()
    for target, whole in found:
        assert_equal(target, whole)


@on_ranks(2)
def test_what_a_rank_sent_through_shared_memory_may_be_changed_before_others_read_it(rank: int) -> None:
    rank_group, numel = RankGroup.of(dist.group.WORLD), 100_000
    channels = P2PChannels()
    plan = plan_transfer(
        IrregularPartition((Interval(0, numel), Interval(0, 0))),
        IrregularPartition((Interval(0, 0), Interval(0, numel))),
        rank,
    )
    source = torch.arange(numel) if rank == 0 else torch.arange(0)
    target = torch.zeros(numel if rank == 1 else 0, dtype=torch.int64)
    assert transport_of(rank_group) is not None  # which connects ranks
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["changed"])
    channels.add(plan, source, target, rank_group=rank_group, device=CPU)
    channels.wait()
    source.zero_()
    if rank == 0:
        store.set("changed", "")
    dist.barrier()
    assert_equal(target, torch.arange(len(target)))
