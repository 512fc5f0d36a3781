"""Optimizers that also hold parameters that no unit manages: the states of the managed ones load, ids as torch's."""

from __future__ import annotations

import bisect
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard, load_checkpoint, save_checkpoint
from fsdp_flat.errors import OptionError
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import full_params
from tests.support.peer import peer_fsdp, peer_warnings_silenced
from tests.support.wrapper_models import seeded, shard, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Gradients of 1 parameter of Net are each rank's own:UserWarning"),
]


class Net(nn.Module):
    """Units between, perhaps, two parameters of the module itself, which is not wrapped."""

    scale: torch.Tensor

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 2)
        if more:
            self.register_parameter("scale", nn.Parameter(torch.ones(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x * self.scale if hasattr(self, "scale") else x)


def net(wrap: Callable[..., Any], use_orig_params: bool, *, more: bool) -> Any:
    model: Any = seeded(lambda: Net(more))
    for name in ("first", "last"):
        setattr(model, name, wrap(getattr(model, name), use_orig_params=use_orig_params))
    return model


def by_us(module: nn.Module, **kwargs: Any) -> Any:
    return shard(module, by_blocks=False, **kwargs)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of all parameters, in the model's order: the module's own first."""
    return torch.optim.Adam(model.parameters(), lr=0.1)


def completed(state: dict[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """The state dict with a state of the unmanaged parameter, which is the first one, as a caller adds it."""
    bisect.insort(state["param_groups"][0]["params"], 0)
    zeros = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
    state["state"][0] = {"step": torch.tensor(2.0), **zeros}
    return state


def converted(fsdp: Any, how: str, states: Any, model: Any, optimizer: Any) -> Any:
    if how == "to_load":
        return fsdp.optim_state_dict_to_load(model, optimizer, states)
    if how == "flatten_sharded":
        return fsdp.flatten_sharded_optim_state_dict(states, model, optimizer)
    return getattr(fsdp, f"{how}_full_optim_state_dict")(states, model, optim=optimizer)


@ORIG_PARAMS
@pytest.mark.parametrize("how", ["shard", "scatter", "flatten_sharded", "to_load"])
@on_ranks(2)
def test_the_managed_states_get_the_ids_of_fsdp1_and_the_caller_adds_the_rest(
    how: str, use_orig_params: bool, rank: int
) -> None:
    found = []
    for fsdp, wrap in ((PeerFSDP, peer_fsdp), (FSDP, by_us)):
        with peer_warnings_silenced(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*optim_state_dict", category=FutureWarning)
            for text in (".*_get_pg_default_device", "Multiple backends are registered"):
                warnings.filterwarnings("ignore", message=text, category=UserWarning)
            source: Any = net(wrap, use_orig_params, more=False)
            optimizer = adam(source)
            train(source, optimizer, rank, range(2))
            if how == "flatten_sharded":
                states = fsdp.sharded_optim_state_dict(source, optimizer)
            else:
                states = fsdp.full_optim_state_dict(source, optimizer, rank0_only=False)
            model: Any = net(wrap, use_orig_params, more=True)
            optimizer = adam(model)
            loaded = converted(fsdp, how, copy.deepcopy(states), model, optimizer)
        assert loaded["param_groups"][0]["params"] == list(range(1, len(list(model.parameters()))))
        assert 0 not in loaded["state"]
        optimizer.load_state_dict(completed(loaded, model.scale))
        train(model, optimizer, rank, range(2, 3))
        steps = {at: row["step"] for at, row in loaded["state"].items()}
        found.append((loaded["param_groups"], sorted(steps), steps))
        if fsdp is FSDP:
            resumed = fsdp.optim_state_dict(model, optimizer)["state"]
            assert [float(row["step"]) for row in resumed.values()] == [3.0] * 5
    assert_equal(found[1], found[0])


@ORIG_PARAMS
@on_ranks(2)
def test_a_parameter_outside_of_the_model_is_the_callers_too(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    own = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, own, rank, range(2))
    states = FSDP.optim_state_dict(model, own)
    outside = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([outside, *model.parameters()], lr=0.1)
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, states)
    optimizer.load_state_dict(completed(loaded, outside))
    assert {optimizer.state[param]["step"].item() for param in optimizer.state} == {2.0}
    assert_equal([optimizer.state[param] for param in own.state], list(own.state.values()))
    # Instead of the model's: the optimizer is of another model, or from before wrapping.
    with pytest.raises(OptionError, match=r"holds a parameter of shape \(2,\) that is none of this model's"):
        FSDP.optim_state_dict_to_load(model, torch.optim.Adam([outside]), states)


@ORIG_PARAMS
@on_ranks(2)
def test_a_load_that_no_caller_completes_names_what_the_groups_lack(
    use_orig_params: bool, rank: int, tmp_path: Path
) -> None:
    source = net(by_us, use_orig_params, more=False)
    optimizer = adam(source)
    train(source, optimizer, rank, range(2))
    states = FSDP.optim_state_dict(source, optimizer)
    model = net(by_us, use_orig_params, more=True)
    before = full_params(model)
    with pytest.raises(OptionError, match=r"other parameter groups.*no group with 'scale' \(group 0\)"):
        FSDP.optim_state_dict_to_load(model, adam(model), states, load_directly=True)
    save_checkpoint(tmp_path, source, optimizer)
    # The extra parameter is no part of that checkpoint's model, so one of two optimizers of one model is resumed.
    larger = adam(source)
    larger.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(OptionError, match=r"no group with a parameter outside of the model \(group 1\)"):
        load_checkpoint(tmp_path, source, larger)
    assert_equal(full_params(model), before)


@on_ranks(2)
def test_the_second_front_leaves_the_rest_to_the_caller_too(rank: int) -> None:
    def front(more: bool) -> Any:
        model: Any = seeded(lambda: Net(more))
        fully_shard(model.first)
        fully_shard(model.last)
        return model

    source = front(False)
    optimizer = adam(source)
    train(source, optimizer, rank, range(2))
    model = front(True)
    resumed = adam(model)
    loaded = FSDP.optim_state_dict_to_load(model, resumed, FSDP.optim_state_dict(source, optimizer))
    assert loaded["param_groups"][0]["params"] == [1, 2, 3, 4]
    resumed.load_state_dict(completed(loaded, model.scale))
    train(model, resumed, rank, range(2, 3))
    assert [float(resumed.state[param]["step"]) for param in model.parameters()] == [3.0] * 5
