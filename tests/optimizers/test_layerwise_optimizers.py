"""LAMB, LARS and their kind scale by norms of whole parameters: refused on local shards, right by MatrixOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_flat import MatrixOptimizer, fully_shard
from fsdp_flat.errors import OptionError, UsageError
from tests.optimizers.test_matrix_optimizer import compare
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import full_params, square_loss
from tests.support.wrapper_models import batch, seeded, shard

NAMES = (
    *("LAMB", "Lamb", "FusedLAMB", "FusedLamb", "LAMB8bit", "LARS", "Lars", "LARS8bit"),
    *("NovoGrad", "FusedNovoGrad", "NvNovoGrad", "AdamP", "SGDP"),
)
# A part of a name, other capitals or another word are another class.
OTHERS = ("Lambda", "lamb", "LambOfShards", "DistributedFusedLAMB", "DistributedShampoo", "Larson", "Solar")


class Lamb(torch.optim.Optimizer):
    """The algorithm of LAMB without its bias correction, or of LARS (``adapts=False``)."""

    def __init__(self, params: Any, lr: float = 0.1, adapts: bool = True, max_grad_norm: float | None = None) -> None:
        super().__init__(params, {"lr": lr, "adapts": adapts, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                update = param.grad
                if group["adapts"]:
                    state = self.state[param]
                    for key, value in (("exp_avg", update), ("exp_avg_sq", update * update)):
                        state[key] = state[key].lerp(value, 0.1) if key in state else 0.1 * value
                    update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
                param.sub_(group["lr"] * param.norm() / update.norm() * update)


@pytest.mark.of_guards
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_layerwise_optimizers_by_their_usual_names_are_refused_on_local_shards(use_orig_params: bool) -> None:
    for name in NAMES:
        model = shard(seeded(), use_orig_params=use_orig_params)
        kind = type(name, (Lamb,) if name != "Lamb" else (torch.optim.SGD,), {})
        square_loss(model, batch(0)).backward()
        before = full_params(model)
        for each in (kind, type("Mine", (kind,), {})):
            text = rf"{each.__name__} computes with full parameters.*fsdp_flat.MatrixOptimizer"
            with pytest.raises(UsageError, match=text):
                each(model.parameters(), lr=0.1).step()
        assert_equal(full_params(model), before, what="weights")


@on_ranks(2)
def test_a_class_of_another_name_and_one_that_declares_shards_step() -> None:
    for name in OTHERS:
        model = shard(seeded(), use_orig_params=True)
        square_loss(model, batch(0)).backward()
        type(name, (torch.optim.SGD,), {})(model.parameters(), lr=0.1).step()
    optimizer = type("LAMB", (Lamb,), {})(model.parameters())
    optimizer.works_on_slices = True
    optimizer.step()


@pytest.mark.parametrize("adapts", [False, True])
@on_ranks(2, 3)
def test_matrix_optimizer_runs_them_as_on_the_unwrapped_model(adapts: bool, rank: int) -> None:
    model, plain = shard(seeded(), use_orig_params=True), seeded()
    ours = MatrixOptimizer(model, Lamb, params=model.parameters(), adapts=adapts)
    compare(model, plain, ours, Lamb(plain.parameters(), adapts=adapts), rank)


WHOLE = {"fully_shard": fully_shard, "NO_SHARD": lambda model: shard(model, "NO_SHARD", use_orig_params=True)}


@pytest.mark.parametrize("front", WHOLE)
@on_ranks(2)
def test_they_run_as_on_the_unwrapped_model_where_parameters_are_whole(front: str) -> None:
    model: Any = WHOLE[front](seeded())
    plain = seeded()
    ours, theirs = type("LAMB", (Lamb,), {})(model.parameters()), Lamb(plain.parameters())
    for step in range(2):
        for each, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            square_loss(each, batch(0, step)).backward()
            optimizer.step()
    expected = {name: param.detach() for name, param in plain.named_parameters()}
    assert_close(full_params(model), expected, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_matrix_optimizer_refuses_a_norm_of_all_gradients_inside_the_inner_optimizer() -> None:
    model = shard(seeded(), use_orig_params=True)
    with pytest.raises(OptionError, match=r"Lamb clips by the norm of all gradients \(max_grad_norm=1.0\).*call model"):
        MatrixOptimizer(model, Lamb, max_grad_norm=1.0)
    MatrixOptimizer(model, Lamb, max_grad_norm=float("inf"))
