"""ShardedEMA of models with parameters of classes of their own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedEMA, fully_shard
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.extended_tensors import Holder, Rounded, SentInBfloat16


class Base(nn.Linear):
    """A linear without a bias whose weight is of a class of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return x @ (weight.dequantize() if isinstance(weight, Rounded) else weight).T


class Adapted(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Holder], *, trains: bool) -> None:
        super().__init__()
        self.base = Base(8, 8, bias=False)
        self.base.weight = nn.Parameter(make(self.base.weight.detach()), requires_grad=trains)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def sharded(front: str, make: Callable[[torch.Tensor], Holder], *, trains: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*[Adapted(make, trains=trains) for _ in range(2)])
    if front == "originals":
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Base, Adapted}), use_orig_params=True)
    for layers in model:
        fully_shard(layers)
    return fully_shard(model)


def values_of(model: nn.Module) -> list[list[torch.Tensor]]:
    """Return this rank's part of each parameter, as plain tensors."""
    locals_ = [p._local_tensor if isinstance(p, DTensor) else p for p in model.parameters()]
    return [[t.clone() for t in (p.inner() if isinstance(p, Holder) else [p.detach()])] for p in locals_]


def plain_of(model: nn.Module) -> list[torch.Tensor]:
    return [each[0] * each[1][:, None] if len(each) == 2 else each[0] for each in values_of(model)]


def change(model: nn.Module, seed: int) -> None:
    """Set all trained parameters to random values, of which each rank has its own part."""
    torch.manual_seed(seed)
    for param in model.parameters():
        local = param._local_tensor if isinstance(param, DTensor) else param
        with torch.no_grad():
            for each in (local.inner() if isinstance(local, Holder) else [local]) if param.requires_grad else ():
                each.copy_(torch.rand(each.shape) * (100 if each.dtype == torch.int8 else 1))


FRONTS = pytest.mark.parametrize("front", ["fully_shard", "originals"])


@FRONTS
@on_ranks(2)
def test_frozen_weights_of_several_tensors_are_copied_and_adapters_averaged(front: str) -> None:
    model = sharded(front, Rounded.of, trains=False)
    before, average = values_of(model), ShardedEMA(model, 0.75)
    change(model, 1)
    own, output = values_of(model), model(torch.eye(8))
    average.update()
    with average.swap():
        inside = values_of(model)
        assert not torch.equal(model(torch.eye(8)), output)
    for first, mean, last in zip(before, inside, own, strict=True):
        if len(first) == 2:
            assert_equal(mean, first)
        else:
            torch.testing.assert_close(mean[0], 0.75 * first[0] + 0.25 * last[0])
    assert_equal(values_of(model), own)
    assert torch.equal(model(torch.eye(8)), output)
    # A base that was loaded meanwhile is that of the average too.
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    again = ShardedEMA(sharded(front, Rounded.of, trains=False, seed=3), 0.5)
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
    with again.swap():
        assert_equal(values_of(again._model), inside)


@pytest.mark.parametrize("make", [SentInBfloat16, Rounded.of])
@FRONTS
@on_ranks(2)
def test_the_average_of_trained_weights_of_a_class_is_that_of_their_values(
    front: str, make: Callable[[torch.Tensor], Holder]
) -> None:
    model = sharded(front, make, trains=True)
    average, expected = ShardedEMA(model, 0.75), plain_of(model)
    for seed in range(3):
        change(model, seed)
        average.update()
        expected = [0.75 * old + 0.25 * new for old, new in zip(expected, plain_of(model), strict=True)]
    own = values_of(model)
    for _ in range(2):
        with average.swap():
            for mean, value in zip(plain_of(model), expected, strict=True):
                step = value.abs().max() / 127 if make == Rounded.of and value.dim() == 2 else 1e-6
                torch.testing.assert_close(mean, value, atol=float(step), rtol=1e-6)
        assert_equal(values_of(model), own)
