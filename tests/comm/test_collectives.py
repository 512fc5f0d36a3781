"""Every implementation of all-gather and reduce-scatter gives a plain concatenation and a plain sum."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat.comm import Pending, RankGroup, begin_all_reduce, collectives_for, exchange_bytes, exchange_ints
from fsdp_flat.comm.flat_collectives import Collectives, GlooAcceleratorCollectives, GlooCollectives
from fsdp_flat.comm.shm import SharedMemoryCollectives
from fsdp_flat.core import MemoryPool
from fsdp_flat.errors import RankMismatchError
from tests.support import assert_equal, on_ranks

KINDS = [Collectives, GlooAcceleratorCollectives, GlooCollectives, SharedMemoryCollectives]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
# Members by global rank: not contiguous and not starting at 0, so that a mix-up of ranks shows.
MEMBERS = {2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}


def axis_of(size: int) -> RankGroup | None:
    """The group over ``MEMBERS[size]``, or None on a rank outside of it."""
    group = dist.new_group(MEMBERS[size])
    return RankGroup.of(group) if dist.get_rank() in MEMBERS[size] else None


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 8, (numel,), generator=generator).to(dtype)


@on_ranks(4)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gather_is_the_concatenation_of_every_ranks_slice(kind: Any, size: int) -> None:
    rank_group = axis_of(size)
    if rank_group is None:
        return
    for dtype in DTYPES:
        slices = [contribution(rank, 5, dtype) for rank in range(size)]
        full = torch.full((5 * size,), 99, dtype=dtype)
        full[5 * rank_group.rank : 5 * (rank_group.rank + 1)] = slices[rank_group.rank]
        pending = kind(rank_group).begin_all_gather(full)
        assert pending.wait() is full
        assert_equal(full, torch.cat(slices), what=f"{dtype}")


@on_ranks(4)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reduction_is_this_ranks_slice_of_the_sum(kind: Any, size: int) -> None:
    rank_group = axis_of(size)
    if rank_group is None:
        return
    for dtype in DTYPES:
        everyone = [contribution(rank, 5 * size, dtype) for rank in range(size)]
        total = torch.stack(everyone).sum(0).to(dtype)
        full = everyone[rank_group.rank].clone()
        result = kind(rank_group).begin_reduce_scatter(full).wait()
        assert_equal(result, total[5 * rank_group.rank : 5 * (rank_group.rank + 1)], what=f"{dtype}")
        full.zero_()
        assert_equal(result, total[5 * rank_group.rank : 5 * (rank_group.rank + 1)], what=f"{dtype}, its own memory")


@on_ranks(4)
def test_a_reduction_over_gloo_returns_its_memory_to_the_pool_once_it_is_summed(rank: int) -> None:
    rank_group, pool = axis_of(4), MemoryPool()
    assert rank_group is not None
    full = torch.ones(400)
    pending = GlooCollectives(rank_group).begin_reduce_scatter(full, pool)
    assert not pool.idle
    assert_equal(pending.wait(), torch.full((100,), 4.0))
    assert list(pool.idle) == [full.nbytes]


@on_ranks(4)
def test_several_begun_collectives_may_be_waited_for_in_any_order() -> None:
    rank_group = axis_of(4)
    assert rank_group is not None
    collectives = collectives_for(rank_group, torch.device("cpu"))
    assert isinstance(collectives, SharedMemoryCollectives)
    fulls = [torch.full((4 * n,), float(rank_group.rank + n)) for n in (1, 2, 3)]
    needs_all_gather = [collectives.begin_all_gather(full) for full in fulls[:2]]
    reduction = collectives.begin_reduce_scatter(fulls[2])
    assert_equal(reduction.wait(), torch.full((3,), float(sum(rank + 3 for rank in range(4)))))
    for n, pending in reversed(list(zip((1, 2), needs_all_gather, strict=True))):
        expected = torch.cat([torch.full((n,), float(rank + n)) for rank in range(4)])
        assert_equal(pending.wait(), expected)


@on_ranks(4)
@pytest.mark.parametrize("kind", [GlooCollectives, SharedMemoryCollectives])
def test_short_floats_are_summed_in_fp32_over_more_than_two_ranks(kind: Any) -> None:
    """256 + 1 + 1 + 1 in bf16 steps would stay 256."""
    rank_group = axis_of(4)
    assert rank_group is not None
    full = torch.full((4,), 256.0 if rank_group.rank == 0 else 1.0, dtype=torch.bfloat16)
    result = kind(rank_group).begin_reduce_scatter(full).wait()
    assert result.dtype is torch.bfloat16
    assert result.item() == 260.0  # the bf16 nearest to 259
    assert (torch.tensor(256.0, dtype=torch.bfloat16) + 1).item() == 256.0


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_same_bits_by_shared_memory_and_by_gloo_whoever_comes_first(
    dtype: torch.dtype, rank: int, num_ranks: int
) -> None:
    rank_group = RankGroup.of(dist.group.WORLD)
    full = torch.randn(1000 * num_ranks, generator=torch.Generator().manual_seed(rank)).to(dtype)
    expected = GlooCollectives(rank_group).begin_reduce_scatter(full.clone()).wait()
    for timeout_error in range(num_ranks):
        if rank == timeout_error:
            time.sleep(0.01)
        for kind in (GlooCollectives, SharedMemoryCollectives):
            assert_equal(kind(rank_group).begin_reduce_scatter(full.clone()).wait(), expected)


class Work:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_a_pending_waits_for_its_works_and_finishes_once() -> None:
    works = [Work(), Work()]
    finished: list[int] = []
    first, last = torch.zeros(1), torch.ones(1)

    def finish() -> torch.Tensor:
        assert [work.num_waits for work in works] == [1, 1]
        finished.append(1)
        return last

    pending = Pending([works[0], None, works[1]], first, finish)
    assert pending.result is first
    assert pending.wait() is last
    assert pending.wait() is last
    assert [work.num_waits for work in works] == [1, 1]
    assert finished == [1]


def test_an_all_reduce_over_one_rank_is_the_tensor_itself() -> None:
    tensor = torch.ones(3)
    assert begin_all_reduce(tensor, RankGroup(None, 0, 1)).wait() is tensor


@on_ranks(4)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_all_reduce_sums_or_takes_the_largest_in_place(size: int) -> None:
    rank_group = axis_of(size)
    if rank_group is None:
        return
    tensor = torch.tensor([float(rank_group.rank), -float(rank_group.rank)])
    begin_all_reduce(tensor, rank_group).wait()
    total = float(sum(range(size)))
    assert_equal(tensor, torch.tensor([total, -total]))
    tensor = torch.tensor([float(rank_group.rank), -float(rank_group.rank)])
    begin_all_reduce(tensor, rank_group, largest=True).wait()
    assert_equal(tensor, torch.tensor([float(size - 1), -0.0]))


@on_ranks(4)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_exchanged_integers_come_back_in_rank_order_with_all_64_bits(size: int) -> None:
    rank_group = axis_of(size)
    if rank_group is None:
        return
    rows = exchange_ints([rank_group.rank, -(2**63) + rank_group.rank, 2**63 - 1], rank_group)
    assert rows == [[rank, -(2**63) + rank, 2**63 - 1] for rank in range(size)]


@on_ranks(4)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_exchanged_bytes_come_back_in_rank_order_whatever_their_lengths(size: int) -> None:
    rank_group = axis_of(size)
    if rank_group is None:
        return
    for payloads in ([b"", b"a\x00", b"\xff" * 1000, b"x"], [b""] * 4):
        got = exchange_bytes(payloads[rank_group.rank], rank_group)
        assert got == payloads[:size]
        got = exchange_bytes(payloads[rank_group.rank], rank_group, only_on_rank0=True)
        assert got == (payloads[:size] if rank_group.rank == 0 else [])


@on_ranks(2)
def test_values_of_another_call_are_not_taken_for_lengths(rank: int) -> None:
    """Memory of that many bytes was asked for."""
    rank_group = RankGroup.of(dist.group.WORLD)
    if rank == 1:
        exchange_ints([-(2**62) + 5], rank_group)
        return
    with pytest.raises(
        RankMismatchError, match=r"Rank 1 of the group was not in the exchange of texts.* while testing"
    ):
        exchange_bytes(b"text", rank_group, "testing")


@on_ranks(2)
def test_first_uses_by_two_threads_of_two_groups_in_other_orders_do_not_wait_for_each_other(rank: int) -> None:
    groups = [RankGroup.of(dist.new_group([0, 1])) for _ in range(2)]
    found: dict[int, torch.Tensor] = {}

    def gather(index: int) -> None:
        time.sleep(0 if index == rank else 0.5)
        full = torch.full((2,), float(rank))
        found[index] = SharedMemoryCollectives(groups[index]).begin_all_gather(full).wait()

    threads = [threading.Thread(target=gather, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for index in range(2):
        assert_equal(found[index], torch.tensor([0.0, 1.0]), what=f"group {index}")
