"""Orders of names in optimizer state dicts, and dicts without groups."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType
from fsdp_flat.api import FullOptimStateDictConfig
from tests.state_dict.kit import FULL, LOCAL, SHARDED, peer_quiet
from tests.support import OWN_PARAMETERS, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import square_loss, train_on
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer


class Noting(torch.optim.AdamW):
    """Makes its states in another order on each rank."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for row in self.state.values():
            items = list({**row, "count": 3, "rate": torch.tensor(0.5), "pair": (1, 2)}.items())
            random.Random(dist.get_rank()).shuffle(items)
            row.clear()
            row.update(items)


def shuffled(model: Any, rank: int) -> torch.optim.Optimizer:
    """An optimizer of two groups that has parameters in another order on each rank, after a step."""
    params = list(model.parameters())
    random.Random(rank).shuffle(params)
    optimizer = Noting([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.1)
    train_on(model, optimizer, [batch(rank)])
    return optimizer


def names_in_order(states: dict[str, Any]) -> list[Any]:
    return [(name, list(row)) for name, row in states["state"].items()]


@ORIG_PARAMS
@on_ranks(2)
def test_names_have_one_order_on_every_rank(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = shuffled(model, rank)
    for kind in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind):
            orders: list[Any] = [None, None]
            dist.all_gather_object(orders, names_in_order(FSDP.optim_state_dict(model, optimizer)))
        assert orders[0] == orders[1]
        assert len(orders[0]) == len(list(seeded().parameters()))
        assert orders[0][0][1] == sorted(["count", "exp_avg", "exp_avg_sq", "pair", "rate", "step"])


@ORIG_PARAMS
@on_ranks(2)
def test_the_order_is_the_peers(use_orig_params: bool, rank: int) -> None:
    orders = []
    with peer_quiet():
        for make in (shard, shard_by_peer):
            model = make(seeded(), use_orig_params=use_orig_params)
            optimizer = torch.optim.AdamW(reversed(list(model.parameters())), lr=0.1)
            square_loss(model, batch(rank)).backward()
            optimizer.step()
            orders.append(list(type(model).optim_state_dict(model, optimizer)["state"]))
    assert orders[0] == orders[1]


@ORIG_PARAMS
@on_ranks(2)
def test_state_dicts_without_groups_are_saved_and_loaded(use_orig_params: bool, rank: int) -> None:
    with peer_quiet():
        for make in (shard_by_peer, shard):
            model = make(seeded(), use_orig_params=use_orig_params)
            fsdp = type(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            square_loss(model, batch(rank)).backward()
            optimizer.step()
            bare = {"state": optimizer.state_dict()["state"]}
            states = fsdp.optim_state_dict(model, optimizer, bare)
            assert sorted(states) == ["state"]
            loaded = fsdp.optim_state_dict_to_load(model, optimizer, states)
            assert sorted(loaded) == ["state"]
            assert sorted(loaded["state"]) == sorted(bare["state"])
    # Not of the peer, which returns views of a buffer that it writes to again.
    assert_equal(loaded["state"], bare["state"])
    assert_equal(states["state"], FSDP.optim_state_dict(model, optimizer)["state"])
    with FSDP.state_dict_type(model, SHARDED):
        chunks = FSDP.optim_state_dict(model, optimizer, bare)
        assert_equal(FSDP.optim_state_dict_to_load(model, optimizer, chunks), loaded)
    with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        sent = FSDP.optim_state_dict_to_load(model, optimizer, states if rank == 0 else None)
        assert_equal(sent, loaded)


class Extra(nn.Module):
    """A module that is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.shift


@ORIG_PARAMS
@OWN_PARAMETERS
@on_ranks(2)
def test_ranks_may_ignore_different_modules(use_orig_params: bool, rank: int) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), *(Extra() for _ in range(rank + 1)))
    ignored = [module for module in inner if isinstance(module, Extra)]
    settings: dict[str, Any] = {"use_orig_params": use_orig_params, "ignored_modules": ignored}
    outer = nn.Sequential(nn.Linear(3, 5), FSDP(inner, sync_module_states=True, **settings), nn.Linear(5, 2))
    model = FSDP(outer, sync_module_states="auto", **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = [batch(rank, step) for step in range(2)]
    train_on(model, optimizer, inputs, before_step=lambda: model.clip_grad_norm_(1.0))
    for kind in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind):
            state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            own = [name for name in states["state"] if not name.startswith(("0.", "1.0", "1.1", "2."))]
            assert len(own) == rank + 1
            model.load_state_dict(state)
            FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)


@on_ranks(2)
def test_optim_input_is_called_an_older_form(rank: int) -> None:
    model = shard(seeded())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_on(model, optimizer, [batch(rank)])
    given = list(model.parameters())
    calls: list[Callable[[], Any]] = [
        lambda: FSDP.full_optim_state_dict(model, optimizer, given, rank0_only=False),
        lambda: FSDP.shard_full_optim_state_dict(states, model, given),
        lambda: FSDP.scatter_full_optim_state_dict(states, model, given),
        lambda: FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_NAME, model, given),
    ]
    states = FSDP.optim_state_dict(model, optimizer)
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [warning.category for warning in caught if "optim_input" in str(warning.message)] == [FutureWarning]
