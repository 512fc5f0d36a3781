"""FlatLayout against the shard metadata of torch FSDP1, and what a layout is as a value."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_flat.core import FlatLayout, LocalShard, alignment_numel
from fsdp_flat.errors import OptionError
from fsdp_flat.layout import Interval

Shapes = list[tuple[int, ...]]


def named(shapes: Sequence[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


# --- against torch FSDP1 ---------------------------------------------------------------------------------------------


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """A default process group that communicates nothing, and whose rank may be chosen."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def peer_handle(
    module: nn.Module, *, rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> Iterator[Any]:
    """The FlatParamHandle that torch FSDP1 makes of ``module`` on ``rank``."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    with fake_rank(rank, world_size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = FullyShardedDataParallel(
                module,
                device_id=torch.device("cpu"),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=use_orig_params,
            )
        yield wrapped._handle


def bag(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> nn.Module:
    module = nn.Module()
    for name, shape in named(shapes):
        module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return module


def layout_as_the_peer_has_it(
    params: Sequence[tuple[str, Sequence[int]]], *, itemsize: int, world_size: int, strategy: str, use_orig_params: bool
) -> FlatLayout:
    return FlatLayout.build(
        params,
        world_size=1 if strategy == "NO_SHARD" else world_size,
        align_numel=alignment_numel(itemsize, use_orig_params=use_orig_params),
        tail_multiple=world_size if use_orig_params else None,
    )


def numels_with_padding(layout: FlatLayout) -> tuple[int, ...]:
    """Lengths of parameters and of padding between them up to the unpadded end, as the peer lists them."""
    found: list[int] = []
    position = 0
    for param_info in layout.param_infos:
        if param_info.offset > position:
            found.append(param_info.offset - position)
        found.append(param_info.numel)
        position = param_info.interval.stop
    if layout.unpadded_numel > position:
        found.append(layout.unpadded_numel - position)
    return tuple(found)


def assert_same_as_peer(layout: FlatLayout, rank: int, handle: Any) -> None:
    flat_param = handle.flat_param
    assert tuple(flat_param._fqns) == layout.fqns
    assert [tuple(shape) for shape in flat_param._shapes] == [param_info.shape for param_info in layout.param_infos]
    assert tuple(flat_param._numels) == tuple(param_info.numel for param_info in layout.param_infos)
    assert tuple(flat_param._numels_with_padding) == numels_with_padding(layout)
    assert flat_param._unpadded_unsharded_size == torch.Size([layout.unpadded_numel])
    assert flat_param._sharded_size == torch.Size([layout.shard_numel]) == flat_param.shape
    tail = Interval(layout.unpadded_numel, layout.numel).intersect(layout.shard(rank))
    assert flat_param._shard_numel_padded == tail.numel

    # torch marks some parameters without elements as "in shard"; nothing depends on it. Our local shards have elements.
    infos = flat_param._shard_param_infos
    theirs = [
        LocalShard(
            index,
            Interval(info.intra_param_start_idx, info.intra_param_end_idx + 1),
            Interval(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard),
        )
        for index, info in enumerate(infos)
        if info.in_shard and info.numel_in_shard
    ]
    assert len(infos) == len(layout.param_infos)
    assert list(layout.local_shards(rank)) == theirs

    metadata = handle.shard_metadata()
    held = [
        (name, tuple(shape), numel, offsets)
        for name, shape, numel, offsets in zip(
            metadata.param_names, metadata.param_shapes, metadata.param_numels, metadata.param_offsets, strict=True
        )
        if numel
    ]
    assert held == [
        (
            param_info.fqn,
            param_info.shape,
            param_info.numel,
            (local_shard.in_param.start, local_shard.in_param.stop - 1),
        )
        for local_shard in layout.local_shards(rank)
        for param_info in [layout.param_infos[local_shard.index]]
    ]


@settings(max_examples=60, deadline=None)
@given(
    # FSDP1 takes no scalars and no flat parameter without elements.
    shapes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6).filter(
        lambda shapes: any(math.prod(shape) for shape in shapes)
    ),
    world_size=st.sampled_from([1, 2, 3, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    strategy=st.sampled_from(["FULL_SHARD", "NO_SHARD"]),
    use_orig_params=st.booleans(),
    data=st.data(),
)
def test_the_layout_is_that_of_torch_fsdp_for_any_shapes(
    shapes: Shapes, world_size: int, dtype: torch.dtype, strategy: str, use_orig_params: bool, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    layout = layout_as_the_peer_has_it(
        named(shapes),
        itemsize=dtype.itemsize,
        world_size=world_size,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
    with peer_handle(
        bag(shapes, dtype), rank=rank, world_size=world_size, strategy=strategy, use_orig_params=use_orig_params
    ) as handle:
        assert_same_as_peer(layout, 0 if strategy == "NO_SHARD" else rank, handle)


@pytest.mark.every_value_in_quick("dtypes that few tests have")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_alignment_is_that_of_torch_fsdp(dtype: torch.dtype) -> None:
    from torch.distributed.fsdp._flat_param import _get_aligned_numel

    assert alignment_numel(dtype.itemsize, use_orig_params=True) == _get_aligned_numel(dtype)
    assert alignment_numel(dtype.itemsize, use_orig_params=False) == 1


# --- the small things ------------------------------------------------------------------------------------------------


def test_the_tail_may_be_padded_for_more_ranks_than_share_the_buffer() -> None:
    layout = FlatLayout.build([("a", (5,))], world_size=1, align_numel=4, tail_multiple=4)
    assert (layout.numel, layout.unpadded_numel, layout.shard_numel) == (8, 8, 8)


def test_a_layout_is_a_value() -> None:
    one, other = (FlatLayout.build(named([(2,), (3,)]), world_size=2) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != FlatLayout.build(named([(2,), (3,)]), world_size=1)
    for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert copied == one
        assert copied.local_shards(1) == one.local_shards(1)
    with pytest.raises(AttributeError):
        one.numel = 7  # type: ignore[misc]


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(OptionError, match="different names, got 'a' at 0 and 1"):
        FlatLayout.build([("a", (1,)), ("a", (2,))], world_size=2)
