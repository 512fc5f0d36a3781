"""Second-order gradients, sparse gradients, and inputs that come from frozen layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import assert_close, on_ranks
from tests.support.beside import CLOSE, WRAPPER_FRONTS, Beside, placed
from tests.support.models import Block, Stack

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")


# ------------------------------------------------------------------------------------------------------ second order


@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_penalty_on_the_gradient_of_inputs_equals_the_plain_model(strategy: str, front: str) -> None:
    def penalty(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        inputs = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(inputs).pow(2).sum(), inputs, create_graph=True)
        return grad.pow(2).mean()

    beside = Beside(Stack(2), front, **placed(strategy))
    beside.train(penalty, num_steps=2)
    beside.train()


@WRAPPER_FRONTS
@on_ranks(2)
def test_gradients_of_inputs_alone_leave_parameters_without_any(front: str) -> None:
    beside = Beside(Stack(2), front)
    x = beside.batch().requires_grad_()
    got, expected = (torch.autograd.grad(model(x).pow(2).sum(), x) for model in beside.models)
    assert_close(got, expected, **CLOSE, what="gradient of the inputs")
    assert all(param.grad is None for param in beside.ours.parameters())
    beside.train()


# ----------------------------------------------------------------------------------------------- sparse and frozen


def tagger(*, sparse: bool = False, frozen: bool = False) -> nn.Sequential:
    """An embedding, blocks and a head over tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8, sparse=sparse), Block(), Block(), nn.Linear(8, 3))
    model[0].requires_grad_(not frozen)
    return model


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(3 + rank + 10 * step))


def beside_tagger(front: str, *, units: tuple[type, ...] = (Block,), **options: Any) -> Beside:
    return Beside(tagger(**options.pop("of", {})), front, units=units, batch=tokens, **options)


@WRAPPER_FRONTS
@pytest.mark.parametrize("under_no_sync", [False, True], ids=["reduced", "accumulated"])
@on_ranks(2)
def test_sparse_embedding_gradients_become_dense_shards(under_no_sync: bool, front: str) -> None:
    beside = beside_tagger(front, of={"sparse": True})
    beside.plain[0].sparse = False
    if under_no_sync:
        with beside.no_sync():
            beside.backward()
    beside.train()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_frozen_input_embedding_costs_no_gradient_and_changes_none(strategy: str) -> None:
    beside = beside_tagger("originals", of={"frozen": True}, **placed(strategy))
    beside.backward()
    beside.train()
    assert beside.ours[0].weight.grad is None


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_frozen_embedding_as_a_unit_of_its_own_goes_with_both_kinds(front: str) -> None:
    beside = beside_tagger(front, units=(Block, nn.Embedding), of={"frozen": True})
    beside.backward()
    beside.train()
