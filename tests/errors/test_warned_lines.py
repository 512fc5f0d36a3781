"""Warnings point to the line that called into the library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType, ShardingStrategy, StateDictType, fully_shard, plan
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.models import BufferedBlock
from tests.support.wrapper_models import seeded, shard


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


def lose_a_hook() -> None:
    module = nn.Linear(2, 2)
    module.weight.register_post_accumulate_grad_hook(lambda _: None)
    FSDP(module)


def step_with_an_empty_group(model: nn.Module) -> None:
    groups = [{"params": list(model.parameters())}, {"params": [p for p in model.parameters() if p.dim() > 1]}]
    torch.optim.SGD(groups, lr=0.1).step()


def train_buffers() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    for _ in range(2):
        step(model)


def train_unwritten() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    fully_shard(model)
    step(model.to_empty(device="cpu"))


def divide(model: Any) -> None:
    fully_shard(model)
    model.set_reduce_scatter_divide_factor(2.0)


def step(model: nn.Module) -> None:
    inputs = torch.full((2, 3), float(dist.get_rank()), dtype=next(model.parameters()).dtype)
    model(inputs).sum().backward()


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "policy without a match": lambda *_: FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({nn.LSTM})),
    "policy with one match": lambda *_: FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({BufferedBlock, nn.LSTM})),
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
    "no sharding": lambda *_: FSDP(seeded(), sharding_strategy=ShardingStrategy.NO_SHARD),
    "hook that will not run": lambda *_: lose_a_hook(),
    "empty group": lambda model, _: step_with_an_empty_group(model),
    "buffers of each rank": lambda *_: train_buffers(),
    "parameters without values": lambda *_: train_unwritten(),
    "short dtype": lambda *_: step(FSDP(seeded().to(torch.bfloat16))),
    "other name of a method": lambda *_: divide(seeded()),
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
    assert caught or (call in {"other weights", "buffers of each rank"} and rank > 0)
    assert {warning.filename for warning in caught} <= {__file__}, [str(warning) for warning in caught]


def test_no_module_calls_warnings_warn_itself() -> None:
    package = Path(fsdp_flat.__file__).parent
    found = {path.name for path in package.rglob("*.py") if "warnings.warn(" in path.read_text()}
    assert found == {"user_warnings.py"}
