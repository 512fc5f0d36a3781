"""``torch.autograd.grad`` of parameters gives this rank's full gradients, as on FSDP1 with flat parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import ShardingStrategy

from fsdp_flat import fully_shard
from fsdp_flat.compat import replace_torch_functions, restore_torch_functions
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.guards.torch_functions import grad
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import square_loss
from tests.support.models import Model
from tests.support.peer import peer_fsdp
from tests.support.wrapper_models import batch, seeded, shard

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(square_loss(model, x), list(model.parameters())))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_of_flat_parameters_are_those_of_fsdp1(strategy: str, rank: int) -> None:
    ours = shard(seeded(), strategy, by_blocks=False)
    theirs = peer_fsdp(seeded(), sharding_strategy=ShardingStrategy[strategy])
    for step in range(2):
        found, expected = (gradients(each, batch(rank, step)) for each in (ours, theirs))
        assert_equal(found, expected)
        assert all(param.grad is None for param in ours.parameters())


@pytest.mark.parametrize("strategy", [*STRATEGIES, "fully_shard"])
@on_ranks(2)
def test_gradients_of_original_parameters_are_those_of_the_unwrapped_model(strategy: str, rank: int) -> None:
    model: Any = seeded()
    model = fully_shard(model) if strategy == "fully_shard" else shard(model, strategy, use_orig_params=True)
    plain = seeded()
    for step in range(2):
        assert_equal(gradients(model, batch(rank, step)), gradients(plain, batch(rank, step)))
    # An ordinary step follows as if nothing had been asked for.
    square_loss(model, batch(rank)).backward()
    assert any(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_inputs_edges_and_unused_parameters_are_torchs(rank: int) -> None:
    model, plain = shard(seeded(), use_orig_params=True), seeded()
    for given in (model, plain):
        x = batch(rank).requires_grad_()
        first = next(given.parameters())
        unused = nn.Parameter(torch.ones(2))
        with pytest.raises(RuntimeError, match="index 1 appears to not have been used in the graph"):
            torch.autograd.grad(square_loss(given, x), [first, unused])
        grads = torch.autograd.grad(square_loss(given, x), (p for p in (x, first, unused)), allow_unused=True)
        assert grads[2] is None
        zeros = torch.autograd.grad(square_loss(given, x), [first, unused], materialize_grads=True)[1]
        assert_equal(zeros, torch.zeros(2))
        edge = torch.autograd.grad(square_loss(given, x), get_gradient_edge(x))[0]
        assert_equal(edge, grads[0])
        if given is model:
            expected = grads[:2]
    assert_equal(list(grads[:2]), list(expected))


@on_ranks(2)
def test_second_order_gradients_are_refused_and_torchs_function_can_be_restored() -> None:
    model = shard(Model(), use_orig_params=True)
    with pytest.raises(UnsupportedError, match=r"create_graph=True for parameters of \['.*Second-order"):
        torch.autograd.grad(square_loss(model, batch(0)), list(model.parameters()), create_graph=True)
    restore_torch_functions()
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        gradients(model, batch(0))
    replace_torch_functions()


@on_ranks(2)
def test_positional_arguments_are_those_of_torchs_function(rank: int) -> None:
    shard(seeded(), use_orig_params=True)
    assert torch.autograd.grad is grad
    own, theirs = (inspect.signature(grad, follow_wrapped=follows).parameters for follows in (False, True))
    assert list(own) == list(theirs)
    x = torch.ones(2, requires_grad=True)
    (found,) = torch.autograd.grad(x.square().sum(), x, None, True, False, True, False, False, False)
    assert_close(found, 2 * x.detach(), rtol=0.0, atol=0.0)
