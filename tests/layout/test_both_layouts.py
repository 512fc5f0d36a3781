"""FlatLayout and PerParamLayout answer the same questions with the same meaning."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_flat.core import FlatLayout, Layout, PerParamLayout

Shapes = list[tuple[int, ...]]
shape_lists = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def flat_layout(shapes: Shapes, world_size: int, align_numel: int) -> Layout:
    return FlatLayout.build(named(shapes), world_size=world_size, align_numel=align_numel)


def per_param_layout(shapes: Shapes, world_size: int, dim: int) -> Layout:
    dims = [dim if dim < len(shape) and shape[dim] % world_size == 0 else 0 for shape in shapes]
    return PerParamLayout.build(named(shapes), dims, world_size=world_size)


def named(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{index}", shape) for index, shape in enumerate(shapes)]


layouts = st.one_of(
    st.builds(flat_layout, shape_lists, st.integers(1, 5), st.sampled_from([1, 4])),
    st.builds(per_param_layout, shape_lists, st.integers(1, 5), st.integers(0, 2)),
)


def numbered(layout: Layout) -> torch.Tensor:
    """Return an unsharded buffer with a different number from 1 for each element of each parameter; padding is 0."""
    unsharded, start = torch.zeros(layout.numel, dtype=torch.int64), 1
    for view in layout.views(unsharded):
        view.copy_(torch.arange(start, start + view.numel()).view(view.shape))
        start += view.numel()
    return unsharded


def in_rank_order(layout: Layout, unsharded: torch.Tensor) -> torch.Tensor:
    return torch.cat([layout.shard_of(rank, unsharded) for rank in range(layout.world_size)])


@given(layouts)
def test_a_shard_has_each_local_part_in_its_place_and_zeros_as_padding(layout: Layout) -> None:
    unsharded = numbered(layout)
    params = layout.views(unsharded)
    for rank in range(layout.world_size):
        shard = layout.shard_of(rank, unsharded)
        expected = torch.zeros(layout.shard_numel, dtype=torch.int64)
        for index, param in enumerate(params):
            local_shard, part = layout.local_shard(index, rank), layout.local_part(index, rank, param)
            assert part.numel() == local_shard.numel == torch.Size(layout.local_shape(index, rank)).numel()
            assert layout.partition(index)[rank] == local_shard.in_param
            expected[local_shard.in_shard.to_slice()] = part
        assert torch.equal(shard, expected)
        dirty = torch.where(shard == 0, -1, shard)
        layout.clear_padding(dirty, rank)
        assert torch.equal(dirty, shard)


@given(layouts)
def test_shards_of_all_ranks_are_the_unsharded_buffer_again(layout: Layout) -> None:
    unsharded = numbered(layout)
    ranked = in_rank_order(layout, unsharded)
    assert torch.equal(layout.unsharded_of(ranked), unsharded)
    if layout.gathers_in_place:
        assert torch.equal(ranked, unsharded)
    buffer = torch.full_like(unsharded, -1)
    target = layout.gather_target(buffer)
    assert (target is None) == layout.gathers_in_place
    if target is not None:
        target.place(0, ranked.view(layout.world_size, -1))
        assert torch.equal(buffer, unsharded)


@given(layouts)
def test_pieces_of_gradients_in_their_places_are_in_rank_order(layout: Layout) -> None:
    unsharded = numbered(layout)
    flat = torch.zeros_like(unsharded)
    for index, (grad, places) in enumerate(zip(layout.views(unsharded), layout.grad_places(flat), strict=True)):
        for place, piece in zip(places, layout.split_grad(grad, index), strict=True):
            place.copy_(piece)
    assert torch.equal(flat, in_rank_order(layout, unsharded))


@given(layouts)
def test_paddings_are_the_elements_in_rank_order_that_no_parameter_has(layout: Layout) -> None:
    ranked = in_rank_order(layout, numbered(layout))
    for padding in layout.paddings():
        assert not padding.is_empty
        assert not ranked[padding.to_slice()].any()
        ranked[padding.to_slice()] = 1
    assert bool((ranked != 0).all())
