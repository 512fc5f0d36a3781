"""What happens inside a step: gradients, accumulation, clipping, evaluation, prefetch, freezing on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import BackwardPrefetch
from tests.support import OWN_STATISTICS, Ranks, assert_close, assert_equal, on_ranks
from tests.support.both_sides import (
    LAYOUTS,
    TOLERANCE,
    Layout,
    Reference,
    adamw,
    assert_same_gradients,
    assert_same_training,
    batch_of,
    build,
    options_for,
    reference_for,
    train_beside_reference,
    wrapped,
)
from tests.support.kit import full_params
from tests.support.zoo import CASES, Batch, Unused

RanksOf = Callable[..., Ranks]

both_kinds = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
every_layout = pytest.mark.parametrize(
    "num_ranks, layout",
    [pytest.param(num, layout, id=f"{num}ranks-{layout}") for num, some in LAYOUTS.items() for layout in some],
)


def pair(name: str, use_orig_params: bool, layout: Layout = LAYOUTS[2][0], **options: Any) -> tuple[Any, Reference]:
    """A wrapped model and its reference."""
    case = CASES[name]
    model = wrapped(build(case), case.units, use_orig_params=use_orig_params, **options_for(layout), **options)
    return model, reference_for(case, use_orig_params)


# -- gradients -----------------------------------------------------------------------------------------------------


def one_backward(model: nn.Module, reference: Reference, index: int = 0) -> None:
    reference.backward(index)
    reference.case.loss_of(model, batch_of(reference.case, dist.get_rank(), index)).backward()


@on_ranks(2, 4)
@both_kinds
@pytest.mark.parametrize(
    "name", ["uneven sizes", "tied across units", "branch that some ranks use", "unused branch", "frozen middle unit"]
)
def test_gradients_are_the_mean_over_ranks_and_none_where_no_rank_has_one(name: str, use_orig_params: bool) -> None:
    model, reference = pair(name, use_orig_params)
    one_backward(model, reference)
    assert_same_gradients(model, reference)


@on_ranks(2, 4)
def test_a_branch_that_one_rank_uses_gets_that_rank_s_gradient_over_the_number_of_ranks(rank: int) -> None:
    case = CASES["branch that some ranks use"]
    model, reference = pair("branch that some ranks use", True)
    one_backward(model, reference)
    alone = build(case)
    case.loss_of(alone, batch_of(case, 0, 0)).backward()
    expected = alone.routed.experts[0].weight.grad / dist.get_world_size()
    assert_close(reference.model.routed.experts[0].weight.grad, expected, **TOLERANCE)
    assert_same_gradients(model, reference)


def unused_parameters_keep_their_values(layout: Layout, use_orig_params: bool) -> None:
    model, reference = pair("unused branch", use_orig_params, layout)
    before = full_params(model)
    optimizer = adamw(model)
    for index in range(3):
        optimizer.zero_grad()
        one_backward(model, reference, index)
        optimizer.step()
    after = full_params(model)
    untouched = [name for name in before if name.startswith(("branches.unused.", "spare.", "never"))]
    assert len(untouched) == 5
    for name in before:
        if name not in untouched:
            assert not torch.equal(after[name], before[name]), name
    if use_orig_params:
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
        assert_close(after[name], before[name] * factor, **TOLERANCE, what=name)


@every_layout
@both_kinds
def test_weight_decay_does_not_move_a_parameter_that_no_rank_uses(
    ranks: RanksOf, num_ranks: int, layout: Layout, use_orig_params: bool
) -> None:
    ranks(num_ranks).run(unused_parameters_keep_their_values, layout, use_orig_params)


# -- accumulation --------------------------------------------------------------------------------------------------

# For each backward pass of a step whether it runs inside ``no_sync``.
ACCUMULATIONS = {
    "both synced": (False, False),
    "two unsynced": (True, True, False),
    "middle unsynced": (False, True, False),
}


def accumulate(name: str, layout: Layout, use_orig_params: bool, how: str) -> None:
    flags = ACCUMULATIONS[how]
    model, reference = pair(name, use_orig_params, layout)
    train_beside_reference(model, reference, num_steps=2, num_micro_batches=len(flags), no_sync=flags)


@every_layout
@both_kinds
def test_accumulated_gradients_equal_those_of_a_replicated_model(
    ranks: RanksOf, num_ranks: int, layout: Layout, use_orig_params: bool
) -> None:
    ranks(num_ranks).run(accumulate, "nested units", layout, use_orig_params, "two unsynced")


@on_ranks(2)
@both_kinds
@pytest.mark.parametrize("how", ["both synced", "middle unsynced"])
@pytest.mark.parametrize(
    "name", ["tied across units", "branch that some ranks use", "unit used three times", "frozen middle unit"]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_accumulation_goes_with_ties_branches_reuse_and_frozen_units(
    name: str, use_orig_params: bool, how: str, strategy: str
) -> None:
    accumulate(name, Layout(strategy), use_orig_params, how)


# -- clipping ------------------------------------------------------------------------------------------------------


def clip(name: str, layout: Layout, use_orig_params: bool) -> None:
    model, reference = pair(name, use_orig_params, layout)
    # The last limits are far above the norm, so that nothing may change.
    limits = iter([(0.05, 2.0), (0.02, math.inf), (0.05, 1.0), (1e4, 2.0), (1e4, math.inf)])

    def clip_both() -> None:
        max_norm, norm_type = next(limits)
        expected = nn.utils.clip_grad_norm_(reference.model.parameters(), max_norm, norm_type=norm_type)
        actual = model.clip_grad_norm_(max_norm, norm_type=norm_type)
        assert_close(float(actual), float(expected), **TOLERANCE, what=f"{norm_type}-norm")
        assert (float(expected) > max_norm) is (max_norm < 1.0)
        if use_orig_params:
            assert_same_gradients(model, reference)

    train_beside_reference(model, reference, num_steps=5, before_step=clip_both)


@every_layout
@both_kinds
def test_clipping_returns_and_applies_the_norm_of_the_global_gradient(
    ranks: RanksOf, num_ranks: int, layout: Layout, use_orig_params: bool
) -> None:
    ranks(num_ranks).run(clip, "uneven sizes", layout, use_orig_params)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["mixed dtypes", "adapters inside units", "unused branch", "tied across units"])
def test_clipping_counts_each_parameter_once(name: str) -> None:
    clip(name, Layout("FULL_SHARD"), True)


# -- evaluation and prefetch ---------------------------------------------------------------------------------------


def evaluated(model: nn.Module, reference: Reference, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of both in eval mode, without gradients."""
    model.eval()
    reference.model.eval()
    with torch.no_grad():
        ours = reference.case.loss_of(model, batch)
        with reference.buffers_of(dist.get_rank()):
            expected = reference.case.loss_of(reference.model, batch)
    model.train()
    reference.model.train()
    return ours, expected


@on_ranks(2)
@both_kinds
@pytest.mark.parametrize("name", [pytest.param("batch norm", marks=OWN_STATISTICS), "transformer", "nested units"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_evaluation_before_and_between_steps_sees_the_current_parameters_and_buffers(
    rank: int, name: str, use_orig_params: bool, strategy: str
) -> None:
    model, reference = pair(name, use_orig_params, Layout(strategy))
    optimizer = adamw(model)
    for step in range(3):
        ours, expected = evaluated(model, reference, batch_of(reference.case, rank, 100 + step))
        assert_close(ours, expected, **TOLERANCE, what=f"evaluation {step}")
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        one_backward(model, reference, step)
        optimizer.step()
        reference.optimizer.step()
    assert_same_training(model, reference)


@on_ranks(2)
@both_kinds
@pytest.mark.parametrize("backward", [*BackwardPrefetch, None], ids=["pre", "post", "none"])
@pytest.mark.parametrize("name", ["nested units", "unit used three times"])
def test_prefetch_changes_no_number(name: str, use_orig_params: bool, backward: BackwardPrefetch | None) -> None:
    model, reference = pair(name, use_orig_params, backward_prefetch=backward, forward_prefetch=backward is None)
    train_beside_reference(model, reference)


# -- freezing on the way -------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_freezing_and_unfreezing_between_steps_is_followed(rank: int, strategy: str) -> None:
    case = CASES["uneven sizes"]
    model, reference = pair("uneven sizes", True, Layout(strategy))
    optimizer = adamw(model)
    for step in range(5):
        for trained in (model.module, reference.model):
            trained.second.requires_grad_(step not in (1, 2))
            trained.last.linear.weight.requires_grad_(step < 3)
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        expected = reference.backward(step)
        loss = case.loss_of(model, batch_of(case, rank, step))
        loss.backward()
        assert_close(loss.detach(), expected, **TOLERANCE, what=f"loss {step}")
        assert_same_gradients(model, reference)
        optimizer.step()
        reference.optimizer.step()
    assert_same_training(model, reference)
