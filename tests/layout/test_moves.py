"""What moves between ranks, against element-by-element bookkeeping."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_flat.layout import Interval, chunk_interval, chunk_rows, chunk_shape, moves_between


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
    plans = [moves_between(have, want, rank) for rank in range(4)]
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
        run = tensor.reshape(-1)[chunk_interval(shape, world_size, rank).to_slice()]
        expected = rows[rank].reshape(-1) if rank < len(rows) else tensor.new_empty(0)
        assert torch.equal(run, expected)
        assert torch.Size(chunk_shape(shape, world_size, rank)).numel() == run.numel()
        if shape:
            assert chunk_shape(shape, world_size, rank) == (chunk_rows(shape[0], world_size, rank).numel, *shape[1:])
