"""FlatLayout against a buffer written out element by element, and against torch FSDP1's own shard metadata."""

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

from fsdp_flat import ShardingStrategy
from fsdp_flat.core import FlatLayout, LocalShard, alignment_numel, units_of
from fsdp_flat.errors import OptionError
from fsdp_flat.layout import Interval
from tests.support import on_ranks
from tests.support.kit import wrapped
from tests.support.peer import peer_fsdp, peer_warnings_silenced

Shapes = list[tuple[int, ...]]

shape_lists = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=7)
PADDING = -1


def named(shapes: Sequence[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


def write_out(shapes: Sequence[tuple[int, ...]], *, world_size: int, align_numel: int) -> list[tuple[int, int]]:
    """The buffer as a list of (parameter, element of it); (PADDING, PADDING) for padding."""
    buffer: list[tuple[int, int]] = []
    for index, shape in enumerate(shapes):
        while len(buffer) % align_numel:
            buffer.append((PADDING, PADDING))
        buffer.extend((index, element) for element in range(math.prod(shape)))
    while len(buffer) % world_size:
        buffer.append((PADDING, PADDING))
    return buffer


# --- against brute force ---------------------------------------------------------------------------------------------


def owners(layout: FlatLayout, index: int) -> Sequence[int]:
    """The ranks that hold a part of a parameter."""
    return layout.partition(index).ranks(Interval(0, layout.param_infos[index].numel))


@given(shape_lists, st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_layout_is_that_of_a_buffer_written_out_element_by_element(shapes: Shapes, world: int, align: int) -> None:
    layout = FlatLayout.build(named(shapes), world_size=world, align_numel=align)
    buffer = write_out(shapes, world_size=world, align_numel=align)
    assert layout.numel == len(buffer) == layout.shard_numel * world
    for index, param_info in enumerate(layout.param_infos):
        assert param_info.offset % align == 0
        assert buffer[param_info.interval.to_slice()] == [(index, element) for element in range(param_info.numel)]
    padded = [i for interval in layout.paddings() for i in range(interval.start, interval.stop)]
    assert padded == [i for i, (index, _) in enumerate(buffer) if index == PADDING]
    assert not any(interval.is_empty for interval in layout.paddings())


@given(shape_lists, st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_a_ranks_pieces_are_its_part_of_the_buffer(shapes: Shapes, world: int, align: int) -> None:
    layout = FlatLayout.build(named(shapes), world_size=world, align_numel=align)
    buffer = write_out(shapes, world_size=world, align_numel=align)
    for rank in range(world):
        shard = buffer[layout.shard(rank).to_slice()]
        rebuilt = [(PADDING, PADDING)] * layout.shard_numel
        for local_shard in layout.local_shards(rank):
            assert not local_shard.is_empty
            elements = range(local_shard.in_param.start, local_shard.in_param.stop)
            rebuilt[local_shard.in_shard.to_slice()] = [(local_shard.index, element) for element in elements]
        assert rebuilt == shard


@given(shape_lists, st.integers(1, 9), st.sampled_from([1, 4]))
def test_pieces_of_all_ranks_make_up_each_parameter(shapes: Shapes, world: int, align: int) -> None:
    layout = FlatLayout.build(named(shapes), world_size=world, align_numel=align)
    for index, param_info in enumerate(layout.param_infos):
        position = 0
        for rank in range(world):
            local_shard = layout.local_shard(index, rank)
            assert local_shard.in_param.start == position
            assert local_shard.numel == local_shard.in_shard.numel
            assert local_shard.in_shard.stop <= layout.shard_numel
            assert (
                (local_shard in layout.local_shards(rank))
                == (not local_shard.is_empty)
                == (rank in owners(layout, index))
            )
            position = local_shard.in_param.stop
        assert position == param_info.numel


@given(shape_lists, st.integers(1, 9))
def test_shards_without_alignment_are_those_of_torch_chunk(shapes: Shapes, world: int) -> None:
    layout = FlatLayout.build(named(shapes), world_size=world)
    flat = torch.arange(sum(math.prod(shape) for shape in shapes))
    assert layout.unpadded_numel == flat.numel()
    if not flat.numel():
        assert layout.shard_numel == 0
        return
    chunks = flat.chunk(world)
    assert layout.shard_numel == chunks[0].numel()
    for rank in range(world):
        held = layout.shard(rank).intersect(Interval(0, flat.numel()))
        expected = chunks[rank] if rank < len(chunks) else flat[:0]
        assert torch.equal(flat[held.to_slice()], expected)


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


def uneven_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 1))
    )


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


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_each_ranks_shard_holds_the_values_that_torch_fsdp_puts_there(use_orig_params: bool) -> None:
    layout = layout_as_the_peer_has_it(
        [(name, param.shape) for name, param in uneven_model().named_parameters()],
        itemsize=4,
        world_size=4,
        strategy="FULL_SHARD",
        use_orig_params=use_orig_params,
    )
    for rank in range(4):
        model = uneven_model()
        values = [param.detach().flatten().clone() for param in model.parameters()]
        with peer_handle(
            model, rank=rank, world_size=4, strategy="FULL_SHARD", use_orig_params=use_orig_params
        ) as handle:
            shard = handle.flat_param.detach()
            for local_shard in layout.local_shards(rank):
                mine = values[local_shard.index][local_shard.in_param.to_slice()]
                assert torch.equal(shard[local_shard.in_shard.to_slice()], mine)


@pytest.mark.every_value_in_quick("dtypes that few tests have")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_alignment_is_that_of_torch_fsdp(dtype: torch.dtype) -> None:
    from torch.distributed.fsdp._flat_param import _get_aligned_numel

    assert alignment_numel(dtype.itemsize, use_orig_params=True) == _get_aligned_numel(dtype)
    assert alignment_numel(dtype.itemsize, use_orig_params=False) == 1


# --- the small things ------------------------------------------------------------------------------------------------


def test_a_known_layout_reads_as_on_paper() -> None:
    layout = FlatLayout.build([("a", (3, 5)), ("b", ()), ("c", (0,)), ("d", (7,))], world_size=4, align_numel=4)
    assert [param_info.offset for param_info in layout.param_infos] == [0, 16, 20, 20]
    assert (layout.numel, layout.unpadded_numel, layout.shard_numel) == (28, 28, 7)
    assert layout.paddings() == (Interval(15, 16), Interval(17, 20), Interval(27, 28))
    assert layout.shard(2) == Interval(14, 21)
    assert layout.local_shards(2) == (
        LocalShard(0, Interval(14, 15), Interval(0, 1)),
        LocalShard(1, Interval(0, 1), Interval(2, 3)),
        LocalShard(3, Interval(0, 1), Interval(6, 7)),
    )
    assert list(owners(layout, 0)) == [0, 1, 2]
    assert list(owners(layout, 2)) == []


def test_some_ranks_may_hold_nothing_but_padding() -> None:
    layout = FlatLayout.build([("a", (5,))], world_size=4)
    assert (layout.shard_numel, layout.numel, layout.unpadded_numel) == (2, 8, 5)
    assert layout.local_shards(3) == ()
    assert layout.local_shard(0, 3) == LocalShard(0, Interval(5, 5), Interval(0, 0))


def test_parameters_without_elements_are_laid_out_too() -> None:
    layout = FlatLayout.build([("a", (0,)), ("b", (2, 0))], world_size=4)
    assert (layout.numel, layout.shard_numel, layout.paddings()) == (0, 0, ())
    assert all(layout.local_shards(rank) == () for rank in range(4))


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


def test_names_and_intervals_import_no_torch() -> None:
    import pathlib

    import fsdp_flat.layout as package

    for name in ("fqn", "intervals", "name_matches"):
        path = pathlib.Path(package.__file__).with_name(f"{name}.py")
        source = path.read_text()
        assert "import torch" not in source, path
        assert "from torch" not in source, path


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_the_flat_parameter_of_a_unit_has_the_size_of_torchs(strategy: str, use_orig_params: bool) -> None:
    options = {"use_orig_params": use_orig_params}
    ours = wrapped(nn.Linear(4, 1), sharding_strategy=ShardingStrategy[strategy], **options)
    with peer_warnings_silenced():
        theirs = peer_fsdp(
            nn.Linear(4, 1), sharding_strategy=torch.distributed.fsdp.ShardingStrategy[strategy], **options
        )
    (unit,) = units_of(ours)
    assert unit.param_groups[0].layout.unpadded_numel == theirs._handle.flat_param._unpadded_unsharded_size.numel()
