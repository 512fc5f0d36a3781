"""torch's optimizers, gradient clipping and gradient hooks on the DTensors of fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import MixedPrecisionPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import BOTH, CLOSE, Beside, grads_of, whole
from tests.support.kit import mesh
from tests.support.models import Stack

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": partial(torch.optim.Adam, lr=0.05, foreach=False),
    "adam-foreach": partial(torch.optim.Adam, lr=0.05, foreach=True),
    "adam-fused": partial(torch.optim.Adam, lr=0.05, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "adamw-foreach": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, fused=True),
}


def meshes(hybrid: bool) -> dict[str, Any]:
    return {"mesh": mesh(2, dist.get_world_size() // 2)} if hybrid else {}


@on_ranks(2, 4)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("hybrid", [False, True])
def test_an_optimizer_equals_that_of_a_replica(name: str, hybrid: bool) -> None:
    beside = Beside(Stack(), BOTH, optimizer=lambda model: OPTIMIZERS[name](model.parameters()), **meshes(hybrid))
    beside.train(num_steps=4)
    states = beside.optimizer.state_dict()["state"]
    for index, param in enumerate(beside.ours.parameters()):
        for key, state in states[index].items():
            if state is not None and state.dim() > 0:
                assert isinstance(state, DTensor), key
                assert state.to_local().shape == param.to_local().shape


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("hybrid", [False, True])
def test_clipping_equals_that_of_a_replica(norm_type: float, foreach: bool, hybrid: bool) -> None:
    # torch has no infinity norm of DTensors of which a rank has no rows.
    beside = Beside(Stack(num_outputs=8), BOTH, **meshes(hybrid))
    beside.backward()
    everyone = beside.models
    grads = [[param.grad for param in model.parameters()] for model in everyone]
    norms = [whole(nn.utils.get_total_norm(found, norm_type, foreach=foreach)) for found in grads]
    assert_close(norms[:2], [norms[2]] * 2, **CLOSE)
    norm = norms[2].item()
    for bound in (2 * norm, norm / 2):
        found = [
            whole(nn.utils.clip_grad_norm_(model.parameters(), bound, norm_type, foreach=foreach)) for model in everyone
        ]
        assert_close(found[0], found[2], **CLOSE)
        beside.check_gradients()
    after = whole(nn.utils.get_total_norm(grads[0], norm_type, foreach=foreach))
    assert after.item() == pytest.approx(norm / 2, rel=1e-4)
    for model in everyone:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
    beside.check_gradients()


@on_ranks(2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_gradient_hooks_run_after_the_reduction(hybrid: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    tolerance = {"atol": 3e-2, "rtol": 3e-2}
    beside = Beside(Stack(), BOTH, mp_policy=policy, dtype=torch.float32, tolerance=tolerance, **meshes(hybrid))
    calls: list[dict[str, Any]] = []
    for model in beside.sharded.values():
        found: dict[str, Any] = {}
        calls.append(found)
        for name, param in model.named_parameters():

            def note(param: nn.Parameter, name: str = name, found: dict[str, Any] = found) -> None:
                assert isinstance(param.grad, DTensor)
                assert param.grad.placements == param.placements
                found.setdefault(name, []).append(param.grad.to_local().clone())

            param.register_post_accumulate_grad_hook(note)
    for model in beside.sharded.values():
        model.set_requires_gradient_sync(False)
    beside.backward()
    assert calls == [{}, {}]
    for model in beside.sharded.values():
        model.set_requires_gradient_sync(True)
    beside.backward()
    beside.backward()
    ours, theirs = calls
    assert ours.keys() == theirs.keys() == dict(beside.plain.named_parameters()).keys()
    assert {len(each) for each in ours.values()} == {2}
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=2e-2)
    for name, param in beside.ours.named_parameters():
        assert_equal(ours[name][-1], param.grad.to_local())


@on_ranks(2, 4)
def test_an_optimizer_in_the_backward_frees_gradients_as_they_come() -> None:
    beside = Beside(Stack(), BOTH)
    for model in beside.sharded.values():
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

        def step(param: nn.Parameter, optimizers: dict[Any, Any] = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
    plain = torch.optim.SGD(beside.plain.parameters(), lr=0.1)
    for _ in range(3):
        beside.backward()
        assert not any(grad is not None for grad in grads_of(beside.ours).values())
        plain.step()
        plain.zero_grad()
    beside.check_parameters()
