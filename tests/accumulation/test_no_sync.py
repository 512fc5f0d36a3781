"""Gradients accumulated by ``no_sync`` are those of one large batch: in both modes, with every strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from fsdp_flat import ShardingStrategy
from fsdp_flat.composable import trace
from fsdp_flat.core import units_of
from tests.support import Ranks, on_ranks
from tests.support.beside import FRONTS, WRAPPER_FRONTS, Beside, of_stack
from tests.support.both_sides import EVERY_LAYOUT, Layout, beside_case
from tests.support.kit import Trouble, square_loss
from tests.support.models import Stack

RanksOf = Callable[..., Ranks]

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
STRATEGIES = pytest.mark.parametrize("strategy", [each.name for each in ShardingStrategy])


def count_events(events: list[tuple[str, str]], event: str) -> dict[str, int]:
    """How often an event happened, by unit."""
    return dict(Counter(unit for name, unit in events if name == event))


@WRAPPER_FRONTS
@STRATEGIES
@on_ranks(2)
def test_accumulation_under_no_sync_equals_one_large_batch(
    strategy: str, front: str, rank: int, num_ranks: int
) -> None:
    beside = of_stack(front, strategy)
    with trace(beside.ours) as events:
        with beside.no_sync():
            beside.backward()
            beside.backward()
        assert count_events(events, "reduce_scatter") == {}
        reshards = count_events(events, "reshard")
        beside.backward()
        assert set(count_events(events, "reduce_scatter").values()) == {1}
    if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        assert reshards == {}, "parameters stay gathered between the micro batches"
    elif strategy != "NO_SHARD":
        assert reshards["blocks.0"] == 4, "freed after each forward and each backward"
    beside.check_gradients()


@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@on_ranks(4)
def test_accumulation_that_stays_sharded_keeps_shards_only_and_equals_one_large_batch(
    strategy: str, front: str, rank: int, num_ranks: int
) -> None:
    """Pain 10."""
    beside = of_stack(front, strategy)
    model = beside.ours
    handles = [handle for unit in units_of(model) for handle in unit.param_groups]
    with model.no_sync(mode="sharded"):
        for _ in range(2):
            beside.backward()
            assert not any(any(handle.grads.ready()) for handle in handles), "no whole gradient waits"
            held = sum(param.grad.numel() for param in model.parameters() if param.grad is not None)
            assert held <= sum(handle.layout.shard_numel for handle in handles)
    beside.backward()
    beside.check_gradients()


@on_ranks(2)
def test_another_mode_of_no_sync_says_which_there_are(rank: int) -> None:
    model = of_stack("flat").ours
    with pytest.raises(ValueError, match='mode="local" or mode="sharded"; got \'cpu\''), model.no_sync(mode="cpu"):
        pass


@on_ranks(2)
def test_no_sync_is_for_the_root_and_not_nested(rank: int) -> None:
    beside = of_stack("flat")
    model, block = beside.ours, beside.ours.blocks[0]
    model(beside.batch())
    with pytest.raises(RuntimeError, match=r"outermost.*'blocks.0' is nested"), block.no_sync():
        pass
    with model.no_sync(), pytest.raises(AssertionError, match="inside no_sync, of which one level"), model.no_sync():
        pass
    block.set_requires_gradient_sync(False)
    with pytest.raises(AssertionError, match=r"set_requires_gradient_sync\(False\)"), model.no_sync():
        pass
    block.set_requires_gradient_sync(True)
    # None of the errors leaves the units without reduction.
    beside.train()


# For each backward pass of a step whether it runs inside ``no_sync``.
ACCUMULATIONS = {
    "both synced": (False, False),
    "two unsynced": (True, True, False),
    "middle unsynced": (False, True, False),
}


def accumulate(name: str, layout: Layout, front: str, how: str) -> None:
    beside = beside_case(name, front, layout)
    for _ in range(2):
        for in_no_sync in ACCUMULATIONS[how]:
            with beside.no_sync() if in_no_sync else nullcontext():
                beside.backward()
        beside.check_gradients()
        beside.step()
    beside.check_state_dict()


@EVERY_LAYOUT
@WRAPPER_FRONTS
def test_accumulated_gradients_equal_those_of_a_replicated_model(
    ranks: RanksOf, num_ranks: int, layout: Layout, front: str
) -> None:
    ranks(num_ranks).run(accumulate, "nested units", layout, front, "two unsynced")


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("how", ["both synced", "middle unsynced"])
@pytest.mark.parametrize(
    "name", ["tied across units", "branch that some ranks use", "unit used three times", "frozen middle unit"]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_accumulation_goes_with_ties_branches_reuse_and_frozen_units(
    name: str, front: str, how: str, strategy: str
) -> None:
    accumulate(name, Layout(strategy), front, how)


@FRONTS
@pytest.mark.parametrize(("trains", "raising"), [(False, [0, 1]), (False, [0]), (True, [0, 1])])
@on_ranks(2)
def test_gradients_of_earlier_batches_stay_when_a_forward_raises(
    trains: bool, raising: list[int], front: str, rank: int
) -> None:
    beside = Beside(Stack(), front)
    beside.train()
    (head,) = [module for name, module in beside.ours.named_modules() if name.rpartition(".")[2] == "head"]

    def raise_after_the_last_layer(*_: object) -> None:
        raise Trouble("an odd batch")

    with beside.no_sync():
        beside.backward()
        if rank in raising:
            handle = head.register_forward_hook(raise_after_the_last_layer)
            with torch.set_grad_enabled(trains), pytest.raises(Trouble):
                square_loss(beside.ours, beside.batch())
            handle.remove()
        else:
            with torch.set_grad_enabled(trains):
                square_loss(beside.ours, beside.batch())
    beside.train(num_steps=2)
