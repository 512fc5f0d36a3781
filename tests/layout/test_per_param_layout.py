"""PerParamLayout against torch.chunk: each parameter in chunks along one dim, padded to one size."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_flat.core import PerParamLayout, PerParamTarget
from fsdp_flat.core.gather_targets import GatherTarget, join_inputs
from fsdp_flat.errors import OptionError

Shapes = list[tuple[int, ...]]
shape_lists = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def layout_of(shapes: Shapes, world_size: int, choices: Sequence[int]) -> PerParamLayout:
    """Shard each parameter on the dim that ``choices`` asks for, or on dim 0 where that is not divisible."""
    dims = [choice % len(shape) for choice, shape in zip(itertools.cycle(choices), shapes, strict=False)]
    dims = [dim if shape[dim] % world_size == 0 else 0 for dim, shape in zip(dims, shapes, strict=True)]
    named = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
    return PerParamLayout.build(named, dims, world_size=world_size)


layouts = st.builds(layout_of, shape_lists, st.integers(1, 5), st.lists(st.integers(0, 2), min_size=1, max_size=3))


def params_of(layout: PerParamLayout) -> list[torch.Tensor]:
    """Number all elements of all parameters from 1; 0 is for padding."""
    start, found = 1, []
    for param_info in layout.param_infos:
        found.append(torch.arange(start, start + param_info.numel).view(param_info.shape))
        start += param_info.numel
    return found


def shard_of(layout: PerParamLayout, params: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    shard = torch.zeros(layout.shard_numel, dtype=torch.int64)
    for index, param in enumerate(params):
        part = layout.local_part(index, rank, param)
        shard[layout.local_shard(index, rank).in_shard.to_slice()] = part
    return shard


@given(layouts)
def test_local_parts_are_the_chunks_of_torch(layout: PerParamLayout) -> None:
    for index, param in enumerate(params_of(layout)):
        chunks = list(param.chunk(layout.world_size, layout.dims[index]))
        for rank in range(layout.world_size):
            part = layout.local_part(index, rank, param).view(layout.local_shape(index, rank))
            if rank < len(chunks):
                assert torch.equal(part, chunks[rank])
            else:
                assert part.numel() == 0
                assert part.shape[layout.dims[index]] == 0


@given(layouts, st.booleans())
def test_placed_shards_are_the_parameters(layout: PerParamLayout, on_accelerator: bool) -> None:
    params = params_of(layout)
    buffer = torch.full((layout.numel,), -1)
    target = PerParamTarget(layout.chunks_in(buffer), layout.dims, on_accelerator=on_accelerator)
    shards = torch.stack([shard_of(layout, params, rank) for rank in range(layout.world_size)])
    # One row, and then the others together.
    target.place(0, shards[:1])
    if layout.world_size > 1:
        target.place(1, shards[1:])
    for view, param in zip(layout.views(buffer), params, strict=True):
        assert torch.equal(view, param)
        assert view.is_contiguous()
    # Padding too is that of the shards.
    assert torch.equal(buffer.sort().values, shards.view(-1).sort().values)


@given(layouts, st.integers(0, 7), st.integers(0, 7))
def test_rows_of_consecutive_ranks_are_a_copy_of_their_shards(layout: PerParamLayout, one: int, other: int) -> None:
    one, other = sorted((one % layout.world_size, other % layout.world_size))
    buffer = torch.full((layout.numel,), -1)
    target = PerParamTarget(layout.chunks_in(buffer), layout.dims)
    params = params_of(layout)
    shards = torch.stack([shard_of(layout, params, rank) for rank in range(layout.world_size)])
    target.place(0, shards)
    rows = target.rows_of(range(one, other + 1))
    buffer.fill_(-1)
    assert torch.equal(rows, shards[one : other + 1].view(-1))


@given(layouts, st.integers(0, 7), st.booleans())
def test_staged_shards_are_the_parameters_and_their_memory_is_freed(
    layout: PerParamLayout, number: int, on_accelerator: bool
) -> None:
    rank, world_size = number % layout.world_size, layout.world_size
    buffer = torch.empty(layout.numel, dtype=torch.int64)
    target = PerParamTarget(layout.chunks_in(buffer), layout.dims, on_accelerator=on_accelerator)
    for by in (0, 1000):  # the second time in the same memory
        params = [param + by for param in params_of(layout)]
        shards = torch.stack([shard_of(layout, params, rank) for rank in range(world_size)])
        own = shards[rank].clone()
        full, place = target.stage(own, rank, world_size)
        own.zero_()  # what a caller writes later does not reach other ranks
        assert torch.equal(full.view(world_size, -1)[rank], shards[rank])
        full.view(world_size, -1).copy_(shards)
        place()
        for view, param in zip(layout.views(buffer), params, strict=True):
            assert torch.equal(view, param)
        held = weakref.ref(full)
        if on_accelerator:  # streams may still read it, so it is its caller's
            del full, place
        assert held() is None or not held().untyped_storage().nbytes()  # type: ignore[union-attr]


@given(layouts)
def test_partitions_count_elements_with_the_sharded_dim_first(layout: PerParamLayout) -> None:
    for index, param in enumerate(params_of(layout)):
        moved = param.movedim(layout.dims[index], 0)
        partition = layout.partition(index)
        for rank in range(layout.world_size):
            local_shard = layout.local_shard(index, rank)
            assert partition[rank] == local_shard.in_param
            part = layout.local_part(index, rank, param).view(layout.local_shape(index, rank))
            expected = moved.reshape(-1)[local_shard.in_param.to_slice()]
            assert torch.equal(part.movedim(layout.dims[index], 0).reshape(-1), expected)
        assert sum(partition[rank].numel for rank in range(layout.world_size)) == math.prod(param.shape)


def test_scalars_and_uneven_inner_dims_are_refused() -> None:
    with pytest.raises(OptionError, match="'p' is a scalar"):
        PerParamLayout.build([("p", ())], [0], world_size=2)
    with pytest.raises(OptionError, match=r"'p' of shape \(4, 3\) cannot be sharded on dim 1 over 2 ranks"):
        PerParamLayout.build([("p", (4, 3))], [1], world_size=2)
    with pytest.raises(OptionError):
        PerParamLayout.build([("p", (4, 3)), ("p", (2,))], [0, 0], world_size=2)


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_joined_rows_of_two_layouts_are_their_parameters_in_the_dtype_of_compute(on_accelerator: bool) -> None:
    inputs: list[list[tuple[torch.Tensor, GatherTarget | None]]] = []
    buffers, fulls = list[torch.Tensor](), list[torch.Tensor]()
    world_size, stored = 2, torch.float64 if on_accelerator else torch.float32
    given_shapes: list[Shapes] = [[(4, 3), (5,)], [(2, 2)]]
    for shapes in given_shapes:
        layout = layout_of(shapes, world_size, [0])
        fulls += [param.float() for param in params_of(layout)]
        buffer = torch.empty(layout.numel)
        buffers += layout.views(buffer)
        target = PerParamTarget(layout.chunks_in(buffer), layout.dims, on_accelerator=on_accelerator)
        shards = [shard_of(layout, params_of(layout), rank).to(stored) for rank in range(world_size)]
        inputs.append([(shard, target) for shard in shards])
    joined = [join_inputs(of_rank) for of_rank in zip(*inputs, strict=True)]
    (own, target), (other, _) = (row for (row,) in joined)
    assert target is not None
    full, place = target.stage(own, 0, world_size)
    full.view(world_size, -1)[1].copy_(other)
    place()
    for view, param in zip(buffers, fulls, strict=True):
        assert torch.equal(view, param)
