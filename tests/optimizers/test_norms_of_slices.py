"""LAMB and LARS on local shards: an error by their class names, and right where parameters are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MatrixOptimizer, ShardingStrategy, fully_shard
from fsdp_flat.errors import UsageError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import full_params, seeded, square_loss, train_on, wrapped
from tests.support.models import Model
from tests.support.wrapper_models import batch

NAMES = (
    *("LAMB", "Lamb", "FusedLAMB", "FusedLamb", "LAMB8bit", "LARS", "Lars", "LARS8bit"),
    *("NovoGrad", "FusedNovoGrad", "NvNovoGrad", "AdamP", "SGDP"),
)
# A part of a name, other capitals or another word are another class.
OTHERS = ("Lambda", "LambdaSGD", "lamb", "LambOfShards", "DistributedFusedLAMB", "DistributedShampoo", "MuonAdamW")


class Trusted(torch.optim.Optimizer):
    """Steps along each gradient with LAMB's trust ratio: the norm of the parameter over that of its step."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.norm() / param.grad.norm() * param.grad)


def named(name: str) -> type[Trusted]:
    return type(name, (Trusted,), {})


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))


@pytest.mark.of_guards
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_an_optimizer_of_norms_is_refused_by_the_name_of_its_class_or_base_class_before_it_changes_a_weight(
    use_orig_params: bool, rank: int
) -> None:
    model = FSDP(seeded(Model), use_orig_params=use_orig_params)
    square_loss(model, batch(rank)).backward()
    before = full_params(model)
    for name in NAMES:
        for kind in (named(name), type("Mine", (named(name),), {})):
            with pytest.raises(UsageError, match=f"{kind.__name__} computes with full parameters"):
                kind(model.parameters()).step()
    assert_equal(full_params(model), before)


@pytest.mark.parametrize("name", OTHERS)
@on_ranks(2)
def test_a_class_of_another_name_and_one_that_declares_shards_are_not_refused(name: str, rank: int) -> None:
    model = FSDP(seeded(Model), use_orig_params=True)
    square_loss(model, batch(rank)).backward()
    named(name)(model.parameters()).step()
    optimizer = named("LAMB")(model.parameters())
    optimizer.works_on_slices = True  # type: ignore[attr-defined]
    optimizer.step()


FRONTS: dict[str, Callable[[nn.Sequential], Any]] = {
    "NO_SHARD": lambda model: wrapped(model, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True),
    # One flat parameter has the norm of its only parameter.
    "units of one parameter": lambda model: nn.Sequential(
        *[
            wrapped(each, sharding_strategy=ShardingStrategy.NO_SHARD) if isinstance(each, nn.Linear) else each
            for each in model
        ]
    ),
    "fully_shard": fully_shard,
    "matrix": lambda model: FSDP(model, use_orig_params=True),
}


@pytest.mark.parametrize("front", FRONTS)
@on_ranks(2)
def test_norms_of_whole_parameters_are_right_and_not_refused(front: str, rank: int) -> None:
    plain: nn.Module = seeded(chain)
    train_on(plain, Trusted(plain.parameters()), [torch.cat([batch(0), batch(1)])])
    model, kind = FRONTS[front](seeded(chain)), named("LAMB")
    optimizer = MatrixOptimizer(model, kind, lr=0.1) if front == "matrix" else kind(model.parameters())
    train_on(model, optimizer, [batch(rank)])
    assert_close(full_params(model), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)
