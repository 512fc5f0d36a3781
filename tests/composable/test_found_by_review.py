"""Copies of parameters with gradients, torch's native paths in eval, and gradients after an exception."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import fully_shard
from tests.support import on_ranks
from tests.support.kit import Stack, seeded, square_loss


def sharded_stack() -> Stack:
    model = seeded()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@on_ranks(2)
def test_parameters_their_gradients_and_an_optimizer_can_be_copied_and_saved() -> None:
    model = sharded_stack()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        square_loss(model, torch.randn(3, 8)).backward()
        optimizer.step()
    for param in model.parameters():
        twin = copy.deepcopy(param)
        assert isinstance(twin.grad, DTensor)
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(twin.grad.to_local(), param.grad.to_local(), rtol=0, atol=0)
        written = io.BytesIO()
        torch.save(param.grad, written)
        # Of the gradient alone, not of its unit's.
        assert written.tell() < 4 * param.grad.to_local().numel() + 6000
    copied = copy.deepcopy(optimizer)
    assert len(copied.state) == len(optimizer.state)


@on_ranks(2)
def test_attention_that_is_a_unit_of_its_own_runs_in_an_encoder_layer_without_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer = copy.deepcopy(plain)
    fully_shard(layer.self_attn)
    fully_shard(layer)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), plain.eval()(x))


@on_ranks(2)
def test_zero_grad_after_a_backward_that_raised_clears_all_gradients() -> None:
    model = sharded_stack()
    fresh = sharded_stack()

    def fail(_grad: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    square_loss(model, torch.ones(3, 8)).backward()
    hook = model.blocks[1].register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
    loss = square_loss(model, torch.ones(3, 8))
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    hook.remove()
    model.zero_grad()
    x = torch.full((3, 8), 0.5)
    square_loss(model, x).backward()
    square_loss(fresh, x).backward()
    for param, expected in zip(model.parameters(), fresh.parameters(), strict=True):
        assert isinstance(param.grad, DTensor)
        assert isinstance(expected.grad, DTensor)
        torch.testing.assert_close(param.grad.to_local(), expected.grad.to_local())
