"""Second-order gradients, sparse gradients, and inputs that come from frozen layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import on_ranks
from tests.support.surface_models import (
    Block,
    assert_near,
    batches,
    grads_or_zeros,
    mean_loss,
    plain_grads,
    plain_mean_grads,
    sharded,
    small_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
KINDS = pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])


# ------------------------------------------------------------------------------------------------------ second order


@KINDS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_differentiable_parameter_gradients_are_refused_by_name(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    loss = mean_loss(model, batches(num_ranks)[rank])
    with pytest.raises(NotImplementedError, match=r"'3\.(weight|bias)'.*create_graph=True"):
        loss.backward(create_graph=True)
    # The next step is right.
    mean_loss(model, batches(num_ranks)[rank]).backward()
    assert_near(grads_or_zeros(model), plain_mean_grads(small_model(), num_ranks), 1e-5, "gradients")


@KINDS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_penalty_on_the_gradient_of_inputs_equals_the_plain_model(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    def penalty(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        inputs = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(inputs).pow(2).sum(), inputs, create_graph=True)
        return grad.pow(2).mean()

    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    for _ in range(2):
        model.zero_grad()
        penalty(model, batches(num_ranks)[rank]).backward()
        expected = plain_mean_grads(small_model(), num_ranks, penalty)
        assert_near(grads_or_zeros(model), expected, 1e-5, "gradients of the penalty")
        assert all(unit.is_sharded or not unit.needs_all_gather for unit in model._unit.step.units)
    model.zero_grad()
    mean_loss(model, batches(num_ranks)[rank]).backward()
    assert_near(grads_or_zeros(model), plain_mean_grads(small_model(), num_ranks), 1e-5, "gradients of the next step")


@KINDS
@on_ranks(2)
def test_gradients_of_inputs_alone_leave_parameters_without_any(
    use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model, plain = sharded(small_model(), use_orig_params=use_orig_params), small_model()
    x = batches(num_ranks)[rank]
    mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    (got,) = torch.autograd.grad(model(mine).pow(2).sum(), mine)
    (expected,) = torch.autograd.grad(plain(reference).pow(2).sum(), reference)
    assert_near(got, expected, 1e-5, "gradient of the inputs")
    assert all(param.grad is None for param in model.parameters())
    mean_loss(model, x).backward()
    assert_near(grads_or_zeros(model), plain_mean_grads(small_model(), num_ranks), 1e-5, "gradients of the next step")


# ----------------------------------------------------------------------------------------------- sparse and frozen


def tagger(*, sparse: bool = False, frozen: bool = False) -> nn.Sequential:
    """An embedding, blocks and a head over tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 7, sparse=sparse), Block(), Block(), nn.Linear(7, 3))
    model[0].requires_grad_(not frozen)
    return model


def tokens(num_ranks: int) -> torch.Tensor:
    return torch.randint(0, 11, (num_ranks, 4), generator=torch.Generator().manual_seed(3))


@KINDS
@pytest.mark.parametrize("under_no_sync", [False, True], ids=["reduced", "accumulated"])
@on_ranks(2)
def test_sparse_embedding_gradients_become_dense_shards(
    under_no_sync: bool, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model, plain = sharded(tagger(sparse=True), use_orig_params=use_orig_params), tagger()
    if under_no_sync:
        with model.no_sync():
            model(tokens(num_ranks)[rank]).pow(2).mean().backward()
    model(tokens(num_ranks)[rank]).pow(2).mean().backward()
    for row in tokens(num_ranks):
        (plain(row).pow(2).mean() * (2 if under_no_sync else 1) / num_ranks).backward()
    assert_near(grads_or_zeros(model), plain_grads(plain), 1e-5, "gradients")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_frozen_input_embedding_costs_no_gradient_and_changes_none(strategy: str, rank: int, num_ranks: int) -> None:
    model, plain = sharded(tagger(frozen=True), strategy, use_orig_params=True), tagger(frozen=True)
    for _ in range(2):
        model(tokens(num_ranks)[rank]).pow(2).mean().backward()
        for row in tokens(num_ranks):
            (plain(row).pow(2).mean() / num_ranks).backward()
    assert_near(grads_or_zeros(model), plain_grads(plain), 1e-5, "gradients")
    assert model[0].weight.grad is None
    assert all(unit.is_sharded or not unit.needs_all_gather for unit in model._unit.step.units)


@KINDS
@on_ranks(2)
def test_a_frozen_embedding_as_a_unit_of_its_own_goes_with_both_kinds(
    use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(tagger(frozen=True), classes=(Block, nn.Embedding), use_orig_params=use_orig_params)
    plain = tagger(frozen=True)
    for _ in range(2):
        model(tokens(num_ranks)[rank]).pow(2).mean().backward()
        for row in tokens(num_ranks):
            (plain(row).pow(2).mean() / num_ranks).backward()
    assert_near(grads_or_zeros(model), plain_grads(plain), 1e-5, "gradients")
    assert all(unit.is_sharded for unit in model._unit.step.units)
