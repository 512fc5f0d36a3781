"""What happens inside a step: gradients, accumulation, clipping, evaluation, prefetch, freezing on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import OWN_STATISTICS, Ranks, assert_close, assert_equal, on_ranks
from tests.support.beside import CLOSE, KINDS
from tests.support.both_sides import LAYOUTS, Layout, beside_case, build
from tests.support.kit import full_params
from tests.support.models import Unused
from tests.support.zoo import CASES

RanksOf = Callable[..., Ranks]

every_layout = pytest.mark.parametrize(
    "num_ranks, layout",
    [pytest.param(num, layout, id=f"{num}ranks-{layout}") for num, some in LAYOUTS.items() for layout in some],
)


# -- gradients -----------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@KINDS
@pytest.mark.parametrize(
    "name", ["uneven sizes", "tied across units", "branch that some ranks use", "unused branch", "frozen middle unit"]
)
def test_gradients_are_the_mean_over_ranks_and_none_where_no_rank_has_one(name: str, front: str) -> None:
    beside = beside_case(name, front)
    beside.backward()
    beside.check_gradients()


@on_ranks(2, 4)
def test_a_branch_that_one_rank_uses_gets_that_rank_s_gradient_over_the_number_of_ranks(rank: int) -> None:
    beside = beside_case("branch that some ranks use", "originals")
    beside.backward()
    if rank == 0:
        alone = build(CASES["branch that some ranks use"]).double()
        CASES["branch that some ranks use"].loss_of(alone, beside.batch(0)).backward()
        expected = alone.routed.experts[0].weight.grad / dist.get_world_size()
        assert_close(beside.plain.routed.experts[0].weight.grad, expected, **CLOSE)
    beside.check_gradients()


def unused_parameters_keep_their_values(layout: Layout, front: str) -> None:
    beside = beside_case("unused branch", front, layout)
    model = beside.ours
    before = full_params(model)
    beside.train(num_steps=2)
    beside.backward()
    beside.optimizer.step()
    after = full_params(model)
    untouched = [name for name in before if name.startswith(("branches.unused.", "spare.", "never"))]
    assert len(untouched) == 5
    for name in before:
        if name not in untouched:
            assert not torch.equal(after[name], before[name]), name
    if front == "originals":
        inner: Unused = model.module
        visible = [inner.never, *inner.branches.unused.parameters(), *inner.spare.parameters()]
        assert [param.grad for param in visible] == [None] * 5
        assert_equal({name: after[name] for name in untouched}, {name: before[name] for name in untouched})
        return
    # The optimizer holds one tensor a unit. A unit that nobody used has no gradient; what is unused inside a
    # used unit has a zero one, so that AdamW only decays it.
    assert [param.grad for param in model.module.spare.parameters()] == [None]
    decayed = (1.0 - 0.05 * 0.2) ** 3
    for name in untouched:
        factor = 1.0 if name.startswith("spare.") else decayed
        assert_close(after[name], before[name] * factor, **CLOSE, what=name)


@every_layout
@KINDS
def test_weight_decay_does_not_move_a_parameter_that_no_rank_uses(
    ranks: RanksOf, num_ranks: int, layout: Layout, front: str
) -> None:
    ranks(num_ranks).run(unused_parameters_keep_their_values, layout, front)


# -- accumulation --------------------------------------------------------------------------------------------------

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


@every_layout
@KINDS
def test_accumulated_gradients_equal_those_of_a_replicated_model(
    ranks: RanksOf, num_ranks: int, layout: Layout, front: str
) -> None:
    ranks(num_ranks).run(accumulate, "nested units", layout, front, "two unsynced")


@on_ranks(2)
@KINDS
@pytest.mark.parametrize("how", ["both synced", "middle unsynced"])
@pytest.mark.parametrize(
    "name", ["tied across units", "branch that some ranks use", "unit used three times", "frozen middle unit"]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_accumulation_goes_with_ties_branches_reuse_and_frozen_units(
    name: str, front: str, how: str, strategy: str
) -> None:
    accumulate(name, Layout(strategy), front, how)


# -- clipping ------------------------------------------------------------------------------------------------------


def clip(name: str, layout: Layout, front: str) -> None:
    beside = beside_case(name, front, layout)
    # The last limits are far above the norm, so that nothing may change.
    for max_norm, norm_type in [(0.05, 2.0), (0.02, math.inf), (0.05, 1.0), (1e4, 2.0), (1e4, math.inf)]:
        beside.backward()
        expected = nn.utils.clip_grad_norm_(beside.plain.parameters(), max_norm, norm_type=norm_type)
        actual = beside.ours.clip_grad_norm_(max_norm, norm_type=norm_type)
        assert_close(float(actual), float(expected), **beside.tolerance, what=f"{norm_type}-norm")
        assert (float(expected) > max_norm) is (max_norm < 1.0)
        beside.check_gradients()
        beside.step()
    beside.check_state_dict()


@every_layout
@KINDS
def test_clipping_returns_and_applies_the_norm_of_the_global_gradient(
    ranks: RanksOf, num_ranks: int, layout: Layout, front: str
) -> None:
    ranks(num_ranks).run(clip, "uneven sizes", layout, front)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["mixed dtypes", "adapters inside units", "unused branch", "tied across units"])
def test_clipping_counts_each_parameter_once(name: str) -> None:
    clip(name, Layout("FULL_SHARD"), "originals")


# -- evaluation ---------------------------------------------------------------------------------------------------


@on_ranks(2)
@KINDS
@pytest.mark.parametrize("name", [pytest.param("batch norm", marks=OWN_STATISTICS), "transformer", "nested units"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_evaluation_before_and_between_steps_sees_the_current_parameters_and_buffers(
    name: str, front: str, strategy: str
) -> None:
    beside = beside_case(name, front, Layout(strategy))
    for step in range(3):
        losses = []
        for model in beside.models:
            model.eval()
            with torch.no_grad():
                losses.append(CASES[name].loss_of(model, beside.batch(100 + step)))
            model.train()
        assert_close(losses[0], losses[1], **CLOSE, what=f"evaluation {step}")
        beside.train()
    beside.check_state_dict()


# -- freezing on the way -------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_freezing_and_unfreezing_between_steps_is_followed(strategy: str) -> None:
    beside = beside_case("uneven sizes", "originals", Layout(strategy))
    for step in range(5):
        for model in beside.models:
            model.second.requires_grad_(step not in (1, 2))
            model.last.linear.weight.requires_grad_(step < 3)
        beside.train()
