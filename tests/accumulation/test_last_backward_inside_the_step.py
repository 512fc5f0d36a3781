"""Accumulation of which the last backward runs inside ``optimizer.step(closure)``, as Lightning does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import assert_close, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import square_loss
from tests.support.wrapper_models import batch, mesh_options, seeded, shard, shard_by_peer, whole_state

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    f"{kind.__name__} {more or 'default'}": partial(kind, **options, **more)
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01, "eps": 0.1}),
    )
    for more in ({}, {"foreach": True}, {"foreach": False})
}
Shown = list[tuple[torch.Tensor | None, ...]]


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> tuple[dict[str, torch.Tensor], Shown]:
    """Two steps of three backwards, two of them in ``no_sync``; the weights, and ``.grad`` between the backwards."""
    shown: Shown = []
    for step in range(2):
        with model.no_sync():
            for micro in range(2):
                square_loss(model, batch(rank, 3 * step + micro)).backward()
                grads = [param.grad for param in model.parameters()]
                shown.append(tuple(None if grad is None else grad.detach().clone() for grad in grads))

        def closure(last: int = 3 * step + 2) -> torch.Tensor:
            loss = square_loss(model, batch(rank, last))
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None  # type: ignore[arg-type]
        optimizer.zero_grad()
    return whole_state(model), shown


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@on_ranks(4)
def test_weights_and_the_gradients_shown_on_the_way_are_fsdp1s(
    kind: str, strategy: str, use_orig_params: bool, rank: int
) -> None:
    options = {"use_orig_params": use_orig_params, **mesh_options(strategy)}
    found = []
    for wrap in (shard, shard_by_peer):
        model: nn.Module = wrap(seeded(), strategy, **options)
        found.append(train(model, OPTIMIZERS[kind](model.parameters()), rank))
    (weights, shown), (expected, shown_by_peer) = found
    assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert_close(shown, shown_by_peer, rtol=1e-5, atol=1e-6)
