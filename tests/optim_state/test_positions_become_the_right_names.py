"""``rekey_optim_state_dict`` without ``optim=``: names that a state dict has, and a warning where it has to guess."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType as PeerKeyType

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType
from tests.support import assert_equal, on_ranks
from tests.support.wrapper_models import shard

NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def model_of_equal_shapes(num_layers: int = 4) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))


def trained(model: nn.Module, params: Any) -> torch.optim.Optimizer:
    """An optimizer whose states differ from parameter to parameter."""
    optimizer = torch.optim.AdamW(params)
    for at, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, at + 1.0)
    optimizer.step()
    model.zero_grad()
    return optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}


def shuffled(model: nn.Module, seed: int) -> list[tuple[str, nn.Parameter]]:
    named = list(model.named_parameters())
    random.Random(seed).shuffle(named)
    return named


GROUPS: dict[str, Callable[[list[Any]], Any]] = {
    "one group": lambda named: named,
    "two groups": lambda named: [{"params": named[1::2], "lr": 0.5}, {"params": named[::2]}],
    "some parameters": lambda named: named[2:],
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("how", GROUPS)
def test_a_state_dict_of_named_parameters_has_its_own_order(how: str, seed: int) -> None:
    model = model_of_equal_shapes()
    optimizer = trained(model, GROUPS[how](shuffled(model, seed)))
    state = optimizer.state_dict()
    for target in (model, model_of_equal_shapes()):
        named = FSDP.rekey_optim_state_dict(copy.deepcopy(state), NAME, target)
        assert_equal(named["state"], by_name(model, optimizer))
        for group, saved in zip(named["param_groups"], state["param_groups"], strict=True):
            assert group["params"] == group["param_names"] == sorted(saved["param_names"])


def test_names_beat_the_order_of_another_optimizer() -> None:
    model = model_of_equal_shapes()
    optimizer = trained(model, shuffled(model, 1))
    other = torch.optim.AdamW(model.parameters())
    named = FSDP.rekey_optim_state_dict(optimizer.state_dict(), NAME, model, optim=other)
    assert_equal(named["state"], by_name(model, optimizer))
    back = FSDP.rekey_optim_state_dict(named, ID, model, optim=other)
    other.load_state_dict(back)
    assert_equal(by_name(model, other), by_name(model, optimizer))
    assert back["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_names_of_another_model_leave_the_order_to_the_model_as_in_fsdp1() -> None:
    model = model_of_equal_shapes()
    optimizer = trained(model, [(f"module.{name}", param) for name, param in model.named_parameters()])
    named = FSDP.rekey_optim_state_dict(optimizer.state_dict(), NAME, model)
    peer = PeerFSDP.rekey_optim_state_dict(optimizer.state_dict(), PeerKeyType.PARAM_NAME, model)
    assert_equal(named["state"], peer["state"])


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
@on_ranks(2)
def test_named_states_of_a_plain_model_resume_in_a_sharded_one(use_orig_params: bool) -> None:
    plain = model_of_equal_shapes()
    optimizer = trained(plain, shuffled(plain, 3))
    model = shard(model_of_equal_shapes(), by_blocks=False, use_orig_params=use_orig_params)
    target = torch.optim.AdamW(model.parameters())
    for source in (plain, model):
        named = FSDP.rekey_optim_state_dict(optimizer.state_dict(), NAME, source)
        target.load_state_dict(FSDP.optim_state_dict_to_load(model, target, named))
        assert_equal(FSDP.optim_state_dict(model, target)["state"], by_name(plain, optimizer))


@pytest.mark.parametrize("how", ["groups", "some"])
def test_an_order_that_is_assumed_is_told(how: str) -> None:
    model = model_of_equal_shapes()
    params = list(model.parameters())
    groups: Any = [{"params": params[4:]}, {"params": params[:4]}] if how == "groups" else params[2:]
    optimizer = trained(model, groups)
    with pytest.warns(UserWarning, match=r"no names for them.* order of model\.parameters\(\)\. .* pass it as optim="):
        found = FSDP.rekey_optim_state_dict(optimizer.state_dict(), NAME, model)
    peer = PeerFSDP.rekey_optim_state_dict(optimizer.state_dict(), PeerKeyType.PARAM_NAME, model)
    assert_equal(found["state"], peer["state"])
    # With the optimizer nothing is assumed.
    found = FSDP.rekey_optim_state_dict(optimizer.state_dict(), NAME, model, optim=optimizer)
    assert_equal(found["state"], by_name(model, optimizer))


def test_a_factor_of_a_state_may_have_the_shape_of_another_parameter() -> None:
    """A row of a weight, as Adafactor keeps one, has the shape of the bias."""
    model = nn.Linear(4, 3)
    rows = {0: {"row": torch.ones(3), "column": torch.ones(4)}, 1: {"square": torch.ones(3)}}
    saved = {"state": rows, "param_groups": [{"params": [0, 1]}]}
    ours = FSDP.rekey_optim_state_dict(saved, NAME, model)
    assert_equal(ours, PeerFSDP.rekey_optim_state_dict(saved, PeerKeyType.PARAM_NAME, model))
    assert ours["state"]["weight"] is rows[0]
