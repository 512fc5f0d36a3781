"""Where all-gathers and reduce-scatter begin, by the trace of the tree."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fsdp_flat import BackwardPrefetch, ShardingStrategy, register_forward_method
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.core import units_of
from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch
from tests.support.kit import BLOCKS, square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.steps import SHARDED, traced

Trace = list[tuple[str, str]]


def at(trace: Trace, event: str, unit: str, nth: int = 0) -> int:
    """Position of the nth such entry."""
    found = [index for index, entry in enumerate(trace) if entry == (event, unit)]
    assert len(found) > nth, f"no {event} of {unit} number {nth} in {trace}"
    return found[nth]


def step_trace(beside: Beside, rank: int, num_before: int = 1) -> Trace:
    beside.zero_grad()
    beside.train(num_steps=num_before)
    trace = traced(beside.ours)
    square_loss(beside.ours, batch(rank)).backward()
    return list(trace)


@on_ranks(2)
@WRAPPER_FRONTS
def test_backward_pre_begins_the_previous_gather_before_the_current_gradients(front: str, rank: int) -> None:
    beside = Beside(Stack(4), front, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)
    trace = step_trace(beside, rank)
    for index in (3, 2, 1):
        own, previous = f"blocks.{index}", f"blocks.{index - 1}"
        begins = at(trace, "unshard", previous, 1)
        assert at(trace, "pre_backward", own) < begins < at(trace, "reduce_scatter", own)
        assert begins < at(trace, "pre_backward", previous) < at(trace, "wait_for_unshard", previous, 1)


@on_ranks(2)
def test_backward_post_begins_the_previous_gather_after_the_current_gradients_and_before_their_reduction(
    rank: int,
) -> None:
    """As in FSDP1: on one communicator the all-gather would wait for a reduction that comes first."""
    beside = Beside(Stack(4), backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    trace = step_trace(beside, rank)
    for index in (3, 2, 1):
        own, previous = f"blocks.{index}", f"blocks.{index - 1}"
        begins = at(trace, "unshard", previous, 1)
        assert at(trace, "pre_backward", own) < begins < at(trace, "reduce_scatter", own)
        assert at(trace, "reshard", own, -1) > begins


@on_ranks(2)
def test_without_backward_prefetch_each_gather_begins_when_it_is_needed(rank: int) -> None:
    beside = Beside(Stack(4), backward_prefetch=None)
    trace = step_trace(beside, rank)
    for index in range(3):
        unit = f"blocks.{index}"
        assert at(trace, "unshard", unit, 1) == at(trace, "pre_backward", unit) + 1
        assert at(trace, "wait_for_unshard", unit, 1) == at(trace, "pre_backward", unit) + 3


@on_ranks(2)
@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_forward_begins_the_next_gather_once_the_own_one_is_there_and_before_it_ends(
    forward_prefetch: bool, rank: int
) -> None:
    """On the CPU with and without the option: nothing overlaps there unless it is begun early."""
    beside = Beside(Stack(4), forward_prefetch=forward_prefetch)
    trace = step_trace(beside, rank)
    order = ["Stack", *[f"blocks.{index}" for index in range(4)]]
    for own, following in itertools.pairwise(order):
        begins = at(trace, "unshard", following)
        assert at(trace, "wait_for_unshard", own) < begins < at(trace, "post_forward", own)
        assert begins < at(trace, "pre_forward", following) < at(trace, "wait_for_unshard", following)


@on_ranks(2)
def test_the_first_forward_knows_no_order_and_begins_each_gather_when_it_is_needed(rank: int) -> None:
    beside = Beside(Stack(4))
    trace = step_trace(beside, rank, num_before=0)
    for index in range(4):
        unit = f"blocks.{index}"
        assert at(trace, "unshard", unit) == at(trace, "pre_forward", unit) + 1


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("strategy", SHARDED)
def test_each_unit_is_freed_before_its_reduction_begins_and_nothing_is_left_at_the_end(
    strategy: ShardingStrategy, prefetch: BackwardPrefetch | None, rank: int
) -> None:
    beside = Beside(Stack(4), sharding_strategy=strategy, backward_prefetch=prefetch)
    trace = step_trace(beside, rank)
    units = ["Stack", *[f"blocks.{index}" for index in range(4)]]
    for unit in units:
        events = [event for event, name in trace if name == unit]
        assert events.count("unshard") == events.count("wait_for_unshard") == events.count("reshard")
        assert events.count("reduce_scatter") == 1
        assert at(trace, "reshard", unit, events.count("reshard") - 1) < at(trace, "reduce_scatter", unit)
    assert trace[-1] == ("root_post_backward", "Stack")
    reduced = [name for event, name in trace if event == "reduce_scatter"]
    assert reduced[:4] == [f"blocks.{index}" for index in (3, 2, 1, 0)]
    beside.zero_grad()
    beside.train()


@on_ranks(2)
def test_full_shard_frees_after_forward_and_shard_grad_op_after_backward(rank: int) -> None:
    for strategy, number in ((ShardingStrategy.FULL_SHARD, 2), (ShardingStrategy.SHARD_GRAD_OP, 1)):
        beside = Beside(Stack(2), sharding_strategy=strategy)
        trace = step_trace(beside, rank)
        assert sum(entry == ("reshard", "blocks.0") for entry in trace) == number
        first = at(trace, "reshard", "blocks.0")
        assert (first < at(trace, "pre_backward", "blocks.0")) == (number == 2)


@on_ranks(2)
@WRAPPER_FRONTS
def test_a_unit_is_freed_once_the_next_all_gather_has_begun_so_the_last_stays_for_backward(
    front: str, rank: int
) -> None:
    beside = Beside(Stack(3), front)
    for num_before in (0, 1):
        trace = step_trace(beside, rank, num_before)
        for index in range(2):
            own, following = f"blocks.{index}", f"blocks.{index + 1}"
            freed = at(trace, "reshard", own)
            assert at(trace, "unshard", following) < freed
            if index == 0:
                assert freed < at(trace, "pre_forward", "blocks.2")
        assert trace.count(("unshard", "blocks.2")) == 1
        assert at(trace, "reshard", "blocks.2") > at(trace, "pre_backward", "blocks.2")


@on_ranks(2)
@WRAPPER_FRONTS
def test_a_last_unit_whose_memory_is_kept_is_sharded_to_everybody(front: str, rank: int) -> None:
    beside = Beside(Stack(3), front)
    loss = square_loss(beside.ours, batch(rank))
    last = units_of(beside.ours)[-1]
    assert last.is_sharded
    assert last.param_groups[0].output.nbytes > 0
    with pytest.raises(UsageError, match=r"while its parameter .* is sharded"):
        last.module(torch.ones(2, WIDTH))
    shown = list(beside.ours.parameters())
    with FSDP.summon_full_params(last.module, recurse=False, writeback=False):
        pass
    whole = {name: value.clone() for name, value in beside.ours.state_dict().items()}
    assert_equal(whole, dict(beside.plain.state_dict()))
    assert all(a is b for a, b in zip(shown, beside.ours.parameters(), strict=True))
    loss.backward()
    assert last.param_groups[0].output.nbytes == 0
    beside.zero_grad()
    beside.train()


@pytest.mark.of_guards
@on_ranks(2)
@WRAPPER_FRONTS
def test_a_rank_that_changed_its_last_unit_after_forward_raises_without_waiting_for_the_others(
    front: str, rank: int
) -> None:
    beside = Beside(Stack(3), front)
    loss = square_loss(beside.ours, batch(rank))
    if rank == 1:
        with torch.no_grad():
            next(units_of(beside.ours)[-1].module.parameters()).mul_(0.5)
        with pytest.raises(PhaseError, match=r"unit 'blocks.2' were changed after the forward"):
            loss.backward()


@on_ranks(2)
@WRAPPER_FRONTS
def test_a_forward_after_a_forward_sees_what_was_written_past_every_version(front: str, rank: int) -> None:
    model = wrapped(
        nn.Sequential(Block(WIDTH)), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=front == "originals"
    )
    first = model(torch.ones(2, WIDTH))
    for param in model.parameters():
        param.data.mul_(0.5)
    assert not torch.equal(model(torch.ones(2, WIDTH)), first)


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_method_without_gradients_leaves_nothing_gathered(strategy: ShardingStrategy, rank: int) -> None:
    beside = Beside(Stack(3), sharding_strategy=strategy)
    inner = beside.ours.module
    inner.evaluate = torch.no_grad()(inner.forward)
    register_forward_method(beside.ours, "evaluate")
    beside.ours.evaluate(batch(rank))
    assert not [unit.name for unit in units_of(beside.ours) if unit.param_groups[0].output.nbytes]


@on_ranks(2)
def test_a_last_unit_that_backward_does_not_need_first_is_freed_before_another_is_gathered(rank: int) -> None:
    beside = Beside(Stack(3))
    trace = traced(beside.ours)
    kept: list[torch.Tensor] = []
    beside.ours.module.blocks[1].register_forward_hook(lambda _module, _args, output: kept.append(output))
    beside.ours(batch(rank))
    kept[0].sum().backward()
    assert at(list(trace), "reshard", "blocks.2") < at(list(trace), "pre_backward", "blocks.1")
    assert all(unit.is_sharded for unit in units_of(beside.ours))


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("strategy", SHARDED)
def test_an_order_that_changes_from_step_to_step_equals_the_reference(
    strategy: ShardingStrategy, prefetch: BackwardPrefetch | None
) -> None:
    beside = Beside(Stack(4), "originals", sharding_strategy=strategy, backward_prefetch=prefetch)
    orders = ([0, 1, 2, 3], [3, 2, 1, 0], [0, 3], [1], [], [0, 1, 2, 3], [2, 2, 0], [3, 1, 2, 0, 3])
    for order in orders:
        beside.ours.module.order = order
        beside.plain.order = order
        beside.train()


@on_ranks(2)
def test_a_wrong_guess_of_the_next_unit_is_freed_and_the_right_one_gathered(rank: int) -> None:
    beside = Beside(Stack(4))
    beside.train()
    beside.ours.module.order = [0, 2]
    trace = traced(beside.ours)
    square_loss(beside.ours, batch(rank)).backward()
    assert at(trace, "unshard", "blocks.1") < at(trace, "pre_forward", "blocks.2")
    assert at(trace, "reshard", "blocks.1") > 0
    assert ("pre_forward", "blocks.1") not in trace


@on_ranks(2)
@pytest.mark.parametrize("prefetch", list(BackwardPrefetch))
def test_units_in_units_prefetch_in_the_order_of_their_outputs(prefetch: BackwardPrefetch, rank: int) -> None:
    module = nn.Sequential(nn.Sequential(Stack(2), nn.Linear(5, 8)), Stack(2))
    beside = Beside(module, auto_wrap_policy=BLOCKS, backward_prefetch=prefetch)
    trace = step_trace(beside, rank)
    reduced = [name for event, name in trace if event == "reduce_scatter"]
    assert [name for name in reduced if "blocks" in name] == [
        "1.blocks.1",
        "1.blocks.0",
        "0.0.blocks.1",
        "0.0.blocks.0",
    ]
    begins = at(trace, "unshard", "0.0.blocks.1", 1)
    assert begins < at(trace, "pre_backward", "0.0.blocks.1")
    assert begins < at(trace, "reduce_scatter", "1.blocks.0")
    assert (begins < at(trace, "post_backward", "1.blocks.0")) == (prefetch is BackwardPrefetch.BACKWARD_PRE)
