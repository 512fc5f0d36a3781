"""Mistakes around wrapping that used to pass in silence: ties that were cut, policies and groups that find nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import whole_shape
from fsdp_flat.errors import OptionError, TiedParameterError
from fsdp_flat.wrap import always_wrap_policy
from tests.support import assert_close, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import full_grads, square_loss, train_on
from tests.support.wrapper_models import batch, message, seeded, shard


class TiedInList(nn.Module):
    """Two layers of a list, and a list of parameters, that share a weight; lists have no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.layers[1].weight = self.layers[0].weight
        self.scales = nn.ParameterList([torch.ones(3), torch.ones(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales):
            x = layer(x) * scale
        return x


@ORIG_PARAMS
@on_ranks(2)
def test_a_tie_between_an_ignored_module_and_one_wrapped_by_hand_is_refused(use_orig_params: bool, rank: int) -> None:
    def tied() -> nn.Module:
        model = seeded()
        model.last = nn.Linear(5, 3, bias=False)
        model.last.weight = nn.Parameter(model.first.weight.detach().T.clone())
        model.first = nn.Linear(5, 3, bias=False)
        model.first.weight = model.last.weight
        return model

    model = tied()
    model.last = FSDP(model.last, use_orig_params=use_orig_params)
    text = message(
        TiedParameterError,
        ValueError,
        lambda: FSDP(model, ignored_modules=[model.first], use_orig_params=use_orig_params),
    )
    assert "'first.weight' of an ignored module" in text
    assert "'weight' (3, 5) of unit 'Linear'" in text
    # Ignored in both calls, or in the only one, the tie is kept.
    model = tied()
    model.last = FSDP(model.last, ignored_states=[model.last.weight], use_orig_params=use_orig_params)
    FSDP(model, ignored_modules=[model.first], use_orig_params=use_orig_params)
    assert model.first.weight is model.last.module.weight


@ORIG_PARAMS
@on_ranks(2)
def test_parameters_of_lists_go_to_a_unit_that_runs(use_orig_params: bool, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no forward")
        model = FSDP(TiedInList(), auto_wrap_policy=always_wrap_policy, use_orig_params=use_orig_params)
    plain = TiedInList()
    square_loss(model, batch(0)).backward()
    square_loss(plain, batch(0)).backward()
    assert_close(full_grads(model), {name: p.grad for name, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)


@pytest.mark.of_guards
@ORIG_PARAMS
@on_ranks(2)
def test_groups_by_number_of_dims_that_find_nothing_are_named_at_the_first_step(
    use_orig_params: bool, rank: int
) -> None:
    def grouped(model: nn.Module, is_weight: Any) -> torch.optim.Optimizer:
        params = list(model.parameters())
        decayed = [param for param in params if is_weight(param)]
        others = [param for param in params if not is_weight(param)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups)

    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = grouped(model, lambda param: param.dim() >= 2)
    bystander = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    train_on(model, bystander, [batch(rank)])
    with pytest.warns(UserWarning, match=r"group of AdamW is empty.*whole_shape"):
        optimizer.step()
    optimizer.step()
    if not use_orig_params:
        assert "use_orig_params=True" in message(OptionError, ValueError, lambda: grouped(model, whole_shape))
        return
    model = shard(seeded(), use_orig_params=True)
    optimizer = grouped(model, lambda param: len(whole_shape(param)) >= 2)
    train_on(model, optimizer, [batch(rank)])
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 4]
    assert whole_shape(torch.ones(2, 3)) == (2, 3)
