"""Gradients of a step are the mean over ranks, and evaluations see the current parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support import OWN_STATISTICS, Ranks, assert_close, assert_equal, on_ranks
from tests.support.beside import CLOSE, WRAPPER_FRONTS
from tests.support.both_sides import EVERY_LAYOUT, Layout, beside_case, build
from tests.support.kit import full_params
from tests.support.models import Unused
from tests.support.zoo import CASES

RanksOf = Callable[..., Ranks]


# -- gradients -----------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@WRAPPER_FRONTS
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


@EVERY_LAYOUT
@WRAPPER_FRONTS
def test_weight_decay_does_not_move_a_parameter_that_no_rank_uses(
    ranks: RanksOf, num_ranks: int, layout: Layout, front: str
) -> None:
    ranks(num_ranks).run(unused_parameters_keep_their_values, layout, front)


# -- evaluation ---------------------------------------------------------------------------------------------------


@on_ranks(2)
@WRAPPER_FRONTS
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
