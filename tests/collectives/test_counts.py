"""How many collectives a step makes, and how many bytes they move: what the layout says and no more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import BackwardPrefetch, ShardingStrategy
from fsdp_flat.core import Unit, units_of
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside, batch
from tests.support.kit import square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.steps import (
    OBJECT_COLLECTIVES,
    STRATEGIES,
    Record,
    acquaint,
    exchange_nbytes,
    mesh_for,
    recorded,
    shared_memory,
)

ITEMSIZE = 8
EVERYTHING = ModuleWrapPolicy({nn.Linear, Block})


def num_gathers(unit: Unit, root: Unit, last: Unit) -> int:
    """Gathers of a unit in a training step; the outermost and the last of the forward stay for the backward."""
    if unit.options.groups.shard.size == 1:
        return 0
    return 2 if unit.control.reshard_after_forward is not False and unit not in (root, last) else 1


def check_step(record: Record, beside: Beside, *, reduces: bool = True, shared: bool = True) -> None:
    """The collectives of one forward and backward against the layouts."""
    units = units_of(beside.ours)
    shard, replicate = units[0].options.groups.rank_groups
    layouts = [(unit, handle.layout) for unit in units for handle in unit.param_groups]
    needs_all_gather = [(num_gathers(unit, units[0], units[-1]), layout) for unit, layout in layouts]
    # Over gloo, one broadcast a rank.
    gather, messages = ("gather", 1) if shared else ("broadcast", shard.size)
    assert record.count(gather) == sum(number * messages for number, _ in needs_all_gather)
    # Each gather: this rank's slice to the others, so (W-1)/W of the unit over all ranks.
    assert record.sent(gather) == sum(
        number * layout.shard_numel * ITEMSIZE * (shard.size - 1) for number, layout in needs_all_gather
    )
    reduction = "reduction" if shared else "all_to_all_single"
    num_reductions = len(layouts) if reduces else 0
    assert record.count(reduction) == (num_reductions if shard.size > 1 else 0)
    assert record.sent(reduction) == (
        sum(layout.numel * ITEMSIZE * (shard.size - 1) / shard.size for _, layout in layouts) if reduces else 0
    )
    reduced = [call.nbytes for call in record.calls if call.name == "all_reduce"]
    expected = []
    if reduces:
        expected = [exchange_nbytes(beside.ours)] * sum(rank_group.size > 1 for rank_group in (shard, replicate))
        if replicate.size > 1:
            expected += [layout.shard_numel * ITEMSIZE for _, layout in layouts]
    assert sorted(reduced) == sorted(expected)
    assert set(record.counts()) <= {gather, reduction, "all_reduce"}


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@WRAPPER_FRONTS
@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])
def test_a_step_makes_the_collectives_that_the_layout_says_and_moves_the_least_bytes(
    shared: bool, front: str, strategy: ShardingStrategy, rank: int
) -> None:
    with shared_memory(shared):
        beside = Beside(Stack(), front, sharding_strategy=strategy, **mesh_for(strategy))
        acquaint(beside.ours)
        for _ in range(3):
            with recorded() as record:
                square_loss(beside.ours, batch(rank)).backward()
            check_step(record, beside, shared=shared)
            with recorded() as record:
                beside.optimizer.step()
                beside.zero_grad()
            assert record.calls == []


@on_ranks(2, 4)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
def test_a_step_sends_the_least_bytes_that_full_sharding_can(prefetch: BackwardPrefetch | None, rank: int) -> None:
    """Each unit is gathered twice and reduced once, (W-1)/W of it each time; the first and the last stay gathered."""
    beside = Beside(Stack(4), backward_prefetch=prefetch)
    acquaint(beside.ours)
    root, *blocks = [
        sum(handle.layout.numel for handle in unit.param_groups) * ITEMSIZE for unit in units_of(beside.ours)
    ]
    size = dist.get_world_size()
    bound = (3 * sum(blocks[:-1]) + 2 * blocks[-1] + 2 * root) * (size - 1) // size
    for step in range(3):
        with recorded() as record:
            square_loss(beside.ours, batch(rank, step)).backward()
        sent = sum(call.sent for call in record.calls if call.name != "all_reduce")
        assert sent == bound
        assert [call.nbytes for call in record.calls if call.name == "all_reduce"] == [exchange_nbytes(beside.ours)]
        beside.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inside_no_sync_nothing_is_reduced(strategy: ShardingStrategy, rank: int) -> None:
    beside = Beside(Stack(), sharding_strategy=strategy, **mesh_for(strategy))
    beside.train()
    with recorded() as record, beside.ours.no_sync():
        square_loss(beside.ours, batch(rank)).backward()
    check_step(record, beside, reduces=False)


@on_ranks(2)
def test_a_forward_without_gradients_gathers_each_unit_once(rank: int) -> None:
    beside = Beside(Stack())
    acquaint(beside.ours)
    for _ in range(2):
        with recorded() as record, torch.no_grad():
            beside.ours(batch(rank))
        assert record.counts() == {"gather": 4}


@on_ranks(2)
def test_object_collectives_are_never_used_for_wrapping_training_or_saving(rank: int) -> None:
    with recorded() as record:
        model = wrapped(Stack(), auto_wrap_policy=EVERYTHING)
        square_loss(model, batch(rank).float()).backward()
        model.clip_grad_norm_(1.0)
        model.load_state_dict(model.state_dict())
    assert record.calls
    assert not [call.name for call in record.calls if call.name in OBJECT_COLLECTIVES or call.name == "barrier"]


@on_ranks(2)
def test_wrapping_makes_a_fixed_number_of_small_exchanges_however_many_units_there_are() -> None:
    counts = []
    for num_blocks in (1, 6):
        with recorded() as record:
            wrapped(Stack(num_blocks), auto_wrap_policy=EVERYTHING)
        assert all(call.nbytes <= 64 for call in record.calls)
        counts.append(record.counts())
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) <= 4
    assert dist.get_world_size() == 2
