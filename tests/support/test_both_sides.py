"""The comparisons of this folder fail when training goes wrong in small ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import OWN_STATISTICS, on_ranks
from tests.support.both_sides import (
    Layout,
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
from tests.support.torch_and_ours import SHARDED, Side, on_both_sides
from tests.support.zoo import CASES

both_kinds = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])


def perturb_on_rank_zero(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if rank == 0 and param.numel() > 0:
                param.view(-1)[0] += 1e-4
                return


@on_ranks(2, 4)
@both_kinds
def test_one_element_changed_on_one_rank_fails_the_comparison_of_parameters(rank: int, use_orig_params: bool) -> None:
    case = CASES["uneven sizes"]
    model = wrapped(build(case), case.units, use_orig_params=use_orig_params)
    reference = reference_for(case, use_orig_params)
    assert_same_training(model, reference)
    perturb_on_rank_zero(model, rank)
    with pytest.raises(AssertionError, match=r"state_dict\[.*1 of \d+ elements differ"):
        assert_same_training(model, reference)


@on_ranks(2)
@both_kinds
def test_a_wrong_start_fails_the_comparison_of_losses(rank: int, use_orig_params: bool) -> None:
    case = CASES["nested units"]
    model = wrapped(build(case), case.units, use_orig_params=use_orig_params)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1e-2)
    with pytest.raises(AssertionError, match="loss 0"):
        train_beside_reference(model, reference_for(case, use_orig_params))


@on_ranks(2)
@both_kinds
def test_gradients_of_a_wrong_scale_fail_although_adam_is_used(use_orig_params: bool) -> None:
    case = CASES["uneven sizes"]
    model = wrapped(build(case), case.units, use_orig_params=use_orig_params)
    model.set_gradient_divide_factor(2.02)
    with pytest.raises(AssertionError, match=r"loss|state_dict"):
        train_beside_reference(model, reference_for(case, use_orig_params))


@on_ranks(2)
@both_kinds
def test_gradients_that_are_not_reduced_fail(use_orig_params: bool) -> None:
    # On a 2x1 mesh each rank has all parameters, so that unreduced gradients only make the ranks drift apart.
    case = CASES["uneven sizes"]
    layout = Layout("HYBRID_SHARD", (2, 1))
    model = wrapped(build(case), case.units, use_orig_params=use_orig_params, **options_for(layout))
    model.register_comm_hook(None, lambda _state, _grad, *_out: None)
    with pytest.raises(AssertionError, match=r"loss|state_dict"):
        train_beside_reference(model, reference_for(case, use_orig_params))


@on_ranks(2)
def test_a_zero_gradient_in_place_of_none_fails_the_comparison_of_gradients(rank: int) -> None:
    case = CASES["unused branch"]
    model = wrapped(build(case), case.units, use_orig_params=True)
    reference = reference_for(case, True)
    reference.backward(0)
    case.loss_of(model, batch_of(case, rank, 0)).backward()
    assert_same_gradients(model, reference)
    model.module.never.grad = torch.zeros_like(model.module.never)
    with pytest.raises(AssertionError, match="never"):
        assert_same_gradients(model, reference)


@OWN_STATISTICS
@on_ranks(2)
def test_buffers_of_another_rank_fail_the_comparison(rank: int) -> None:
    case = CASES["batch norm"]
    model = wrapped(build(case), case.units)
    reference = reference_for(case, False)
    reference.backward(0)
    # The other rank's batch leaves other statistics.
    case.loss_of(model, batch_of(case, 1 - rank, 0)).backward()
    with pytest.raises(AssertionError, match="running_mean"):
        assert_same_training(model, reference)


@on_ranks(2)
def test_weight_decay_of_an_unused_parameter_fails_the_comparison(rank: int) -> None:
    case = CASES["unused branch"]
    model = wrapped(build(case), case.units, use_orig_params=True)
    optimizer = adamw(model)

    def give_zero_gradient() -> None:
        model.module.never.grad = torch.zeros_like(model.module.never)

    assert dist.get_world_size() == 2
    with pytest.raises(AssertionError, match="never"):
        train_beside_reference(model, reference_for(case, True), optimizer=optimizer, before_step=give_zero_gradient)


@on_both_sides(layouts=SHARDED)
def other_results(side: Side, layout: Layout) -> torch.Tensor:
    return torch.zeros(2) if side.is_torch or layout == SHARDED[0] else torch.tensor([0.0, 1e-3])


@on_both_sides(layouts=SHARDED)
def fails_on_ours(side: Side, layout: Layout) -> None:
    assert side.is_torch or layout == SHARDED[0]


def test_another_result_than_torch_s_fails_and_names_the_layout(ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"(?s)2 failures.*rank 0, SHARD_GRAD_OP: result: 1 of 2 elements differ"):
        other_results(ranks=ranks)


def test_an_assert_that_fails_on_one_side_names_the_side_and_the_layout(ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"(?s)2 failures.*rank 1, SHARD_GRAD_OP on ours"):
        fails_on_ours(ranks=ranks)
