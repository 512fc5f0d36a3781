"""What moves between ranks, against element-by-element bookkeeping."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_flat.layout import (
    EvenPartition,
    Interval,
    IrregularPartition,
    ReplicatedPartition,
    chunk_partition,
    chunk_rows,
    chunk_shape,
    plan_transfer,
)


def cut(numel: int, marks: list[int]) -> list[Interval]:
    """Half-open runs that make up ``numel`` elements, some of them empty."""
    edges = [0, *sorted(mark % (numel + 1) for mark in marks), numel]
    return [Interval(start, stop) for start, stop in itertools.pairwise(edges)]


@given(
    numel=st.integers(0, 40),
    held=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    wanted=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=4, max_size=4),
)
def test_moves_bring_every_wanted_element_from_the_one_rank_that_holds_it(
    numel: int, held: list[int], wanted: list[tuple[int, int]]
) -> None:
    have = cut(numel, held)
    want = [Interval(min(a, b) % (numel + 1), max(min(a, b) % (numel + 1), max(a, b) % (numel + 1))) for a, b in wanted]
    whole = torch.arange(numel)
    plans = [plan_transfer(IrregularPartition(tuple(have)), IrregularPartition(tuple(want)), rank) for rank in range(4)]
    for rank, plan in enumerate(plans):
        target = torch.full((want[rank].numel,), -1)
        if plan.kept is not None:
            target[plan.kept[1]] = whole[have[rank].to_slice()][plan.kept[0]]
        for source, run in plan.receives:
            sent = [where for to, where in plans[source].sends if to == rank]
            assert len(sent) == 1
            target[run] = whole[have[source].to_slice()][sent[0]]
        assert torch.equal(target, whole[want[rank].to_slice()])
    assert sum(len(plan.sends) for plan in plans) == sum(len(plan.receives) for plan in plans)


@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    world_size=st.integers(1, 5),
)
def test_chunks_are_those_of_torch_chunk(shape: tuple[int, ...], world_size: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    rows = tensor.chunk(world_size) if shape and shape[0] else [tensor]
    for rank in range(world_size):
        run = tensor.reshape(-1)[chunk_partition(shape, world_size)[rank].to_slice()]
        expected = rows[rank].reshape(-1) if rank < len(rows) else tensor.new_empty(0)
        assert torch.equal(run, expected)
        assert torch.Size(chunk_shape(shape, world_size, rank)).numel() == run.numel()
        if shape:
            assert chunk_shape(shape, world_size, rank) == (chunk_rows(shape[0], world_size, rank).numel, *shape[1:])


@given(
    numel=st.integers(0, 40),
    step=st.integers(1, 12),
    offset=st.integers(0, 30),
    size=st.integers(1, 8),
    marks=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_a_cut_names_the_ranks_that_have_to_do_with_a_run_and_no_others(
    numel: int, step: int, offset: int, size: int, marks: tuple[int, int]
) -> None:
    cut = EvenPartition(numel, step, offset, size)
    run = Interval(min(*marks, numel), min(max(marks), numel))
    having = [rank for rank in range(size) if not cut[rank].intersect(run).is_empty]
    assert [*cut.ranks(run)] == having


def test_a_plan_for_thousands_of_ranks_looks_at_those_it_has_to_do_with() -> None:
    seen: list[int] = []

    class Counted(EvenPartition):
        def __getitem__(self, rank: int) -> Interval:
            seen.append(rank)
            return super().__getitem__(rank)

    held, wanted = Counted(4096 * 10, 10, 0, 4096), Counted(4096 * 10, 15, 5, 4096)
    transfer_plan = plan_transfer(held, wanted, 2000)
    assert transfer_plan.sends
    assert transfer_plan.receives
    assert len(seen) < 10


def test_a_whole_tensor_is_on_one_rank_or_on_all() -> None:
    one, every = ReplicatedPartition(6, 1, 3), ReplicatedPartition(6, None, 3)
    assert [one[rank].numel for rank in range(3)] == [0, 6, 0]
    assert [*one.ranks(Interval(2, 4))] == [1]
    assert [every[rank].numel for rank in range(3)] == [6, 6, 6]
    assert [*every.ranks(Interval(2, 4))] == [0, 1, 2]
