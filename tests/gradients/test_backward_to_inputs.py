"""``backward(inputs=...)`` gives sharded parameters their gradients, and no others, as FSDP1 does with flat ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision
from tests.support import assert_equal, on_ranks
from tests.support.beside import blocks_and_root
from tests.support.kit import square_loss
from tests.support.wrapper_models import batch, mesh_options, seeded, shard, shard_by_peer

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
FRONTS: dict[str, Callable[[Any], Any]] = {
    "flat": lambda model: shard(model),
    "originals": lambda model: shard(model, use_orig_params=True),
    "low": lambda model: shard(model, use_orig_params=True, mixed_precision=LOW),
    "SHARD_GRAD_OP": lambda model: shard(model, "SHARD_GRAD_OP", use_orig_params=True),
    "NO_SHARD": lambda model: shard(model, "NO_SHARD", use_orig_params=True),
    "hybrid": lambda model: shard(model, "HYBRID_SHARD", **mesh_options("HYBRID_SHARD")),
    "fully_shard": blocks_and_root,
    "hybrid fully_shard": lambda model: blocks_and_root(model, mesh=init_device_mesh("cpu", (2, 2))),
}
THREE = ("flat", "originals", "fully_shard")


def grads_of(model: Any) -> list[torch.Tensor | None]:
    grads = [param.grad for param in model.parameters()]
    return [None if each is None else getattr(each, "_local_tensor", each).detach().clone() for each in grads]


def expected(front: str, rank: int) -> list[torch.Tensor | None]:
    model = FRONTS[front](seeded())
    square_loss(model, batch(rank)).backward()
    return grads_of(model)


@pytest.mark.parametrize("front", FRONTS)
@on_ranks(4)
def test_a_backward_to_some_parameters_sets_the_gradients_of_these_alone(front: str, rank: int) -> None:
    wanted = expected(front, rank)
    model = FRONTS[front](seeded())
    params = list(model.parameters())
    square_loss(model, batch(rank)).backward(inputs=params)
    assert_equal(grads_of(model), wanted)
    model.zero_grad()
    square_loss(model, batch(rank)).backward(inputs=params[1:])
    assert_equal(grads_of(model), [None, *wanted[1:]])
    model.zero_grad()
    torch.autograd.backward(square_loss(model, batch(rank)), None, None, False, None, params[0])
    assert_equal(grads_of(model), [wanted[0], *[None] * (len(wanted) - 1)])


@on_ranks(2)
def test_flat_parameters_have_the_gradients_of_fsdp1(rank: int) -> None:
    for chosen in (slice(None), slice(1, 2)):
        found = []
        for build in (shard, shard_by_peer):
            model = build(seeded())
            square_loss(model, batch(rank)).backward(inputs=list(model.parameters())[chosen])
            found.append(grads_of(model))
        assert_equal(found[0], found[1])


@pytest.mark.parametrize("front", THREE)
@on_ranks(2)
def test_each_of_two_models_in_one_graph_is_trained_by_its_own_parameters(front: str, rank: int) -> None:
    """As a generator, whose output passes through a discriminator."""

    def narrow() -> nn.Module:
        model: Any = seeded()
        model.last = nn.Linear(model.last.in_features, 3)
        return model

    pair, others = ([FRONTS[front](narrow()) for _ in range(2)] for _ in range(2))
    square_loss(pair[1], pair[0](batch(rank))).backward(inputs=list(pair[1].parameters()))
    assert all(each is None for each in grads_of(pair[0]))
    square_loss(pair[1], pair[0](batch(rank))).backward(inputs=iter(pair[0].parameters()))
    square_loss(others[1], others[0](batch(rank))).backward()
    assert_equal(grads_of(pair[1]), grads_of(others[1]))
    assert_equal(grads_of(pair[0]), grads_of(others[0]))


@pytest.mark.parametrize("front", THREE)
@on_ranks(2)
def test_gradients_accumulate_and_tensors_that_no_unit_manages_are_torchs(front: str, rank: int) -> None:
    model, other = (FRONTS[front](seeded()) for _ in range(2))
    x, y = (batch(rank).requires_grad_(True) for _ in range(2))
    square_loss(other, y).backward()
    square_loss(other, batch(rank, 1)).backward()
    loss = square_loss(model, x)
    loss.backward(inputs=[x], retain_graph=True)
    assert all(each is None for each in grads_of(model))
    assert_equal(x.grad, y.grad)
    loss.backward(inputs=[x, *model.parameters()])
    assert_equal(x.grad, 2 * y.grad)
    square_loss(model, batch(rank, 1)).backward(inputs=list(model.parameters()))
    assert_equal(grads_of(model), grads_of(other))


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_inside_summon_full_params_the_parameters_themselves_are_in_the_graph(use_orig_params: bool, rank: int) -> None:
    model = FSDP(nn.Linear(3, 2), use_orig_params=use_orig_params)
    plain = nn.Linear(3, 2)
    with FSDP.summon_full_params(model):
        plain.load_state_dict({"weight": model.module.weight, "bias": model.module.bias})
        params = [model.module.weight, model.module.bias]
        found = torch.autograd.grad(nn.functional.linear(batch(rank), *params).pow(2).sum(), params)
    assert_equal(list(found), list(torch.autograd.grad(plain(batch(rank)).pow(2).sum(), list(plain.parameters()))))
