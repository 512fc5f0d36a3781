"""Warnings point to the line that called into the library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType, StateDictType, plan
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.wrapper.models import Block, seeded, shard


class Failing(nn.Module):
    """Has a parameter on the meta device that cannot be initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))

    def reset_parameters(self) -> None:
        raise KeyError("no initialiser")


def initialise() -> None:
    with pytest.raises(KeyError, match="no initialiser"):
        FSDP(Failing())


def ignore_itself() -> None:
    module = nn.Linear(2, 2)
    FSDP(module, ignored_modules=[module])


def summon(model: Any) -> None:
    with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=True):
        pass


def load(model: Any, optimizer: Any, kind: StateDictType, state: dict[str, Any]) -> None:
    with FSDP.state_dict_type(model, kind):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": state})


def rekey(model: Any) -> None:
    given = {"state": {}, "param_groups": []}
    FSDP.rekey_optim_state_dict(given, OptimStateKeyType.PARAM_NAME, model, optim_input=list(model.parameters()))


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "policy without a match": lambda *_: FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({nn.LSTM})),
    "policy with one match": lambda *_: FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({Block, nn.LSTM})),
    "plan": lambda *_: plan(seeded(), 2, auto_wrap_policy=ModuleWrapPolicy({nn.LSTM})),
    "container": lambda *_: FSDP(nn.ModuleList([nn.Linear(2, 2)])),
    "module that is ignored": lambda *_: ignore_itself(),
    "failing reset_parameters": lambda *_: initialise(),
    "other weights": lambda *_: FSDP(seeded(seed=dist.get_rank())),
    "state_dict by position": lambda model, _: model.state_dict({}, "prefix."),
    "summon_full_params": lambda model, _: summon(model),
    "clip_grad_norm_": lambda model, _: model.clip_grad_norm_(1.0),
    "older form": lambda model, optimizer: FSDP.full_optim_state_dict(model, optimizer, list(model.parameters())),
    "rekey_optim_state_dict": lambda model, _: rekey(model),
    "unknown names": lambda model, optimizer: load(
        model, optimizer, StateDictType.FULL_STATE_DICT, {"unknown": {"exp_avg": torch.zeros(1)}}
    ),
    "no state": lambda model, optimizer: load(model, optimizer, StateDictType.SHARDED_STATE_DICT, {}),
}


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_a_warning_points_to_the_callers_line(call: str, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[call](model, optimizer)
    assert caught or (call == "other weights" and rank > 0)
    assert {warning.filename for warning in caught} <= {__file__}, [str(warning) for warning in caught]
