"""State dicts and optimizers of a part of the model's parameters: what FSDP1 loads is loaded, with the same values."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType as PeerKeyType

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType, load_checkpoint, save_checkpoint
from fsdp_flat.api import FullOptimStateDictConfig, StateDictType
from fsdp_flat.errors import OptionError
from fsdp_flat.layout import clean_fqn
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.peer import peer_fsdp, peer_warnings_silenced
from tests.support.wrapper_models import seeded, shard


def layers(wrap: Any, use_orig_params: bool) -> Any:
    """Two units in a plain module."""
    made = (seeded(functools.partial(nn.Linear, 3, width), seed=width) for width in (5, 7))
    return nn.Sequential(*(wrap(module, use_orig_params=use_orig_params) for module in made))


def by_us(module: nn.Module, **kwargs: Any) -> Any:
    return shard(module, by_blocks=False, **kwargs)


def saved_plainly(make: Any, *unused: str) -> dict[str, Any]:
    """The states, under names, of a plain model in which some parameters have never been used."""
    model = layers(lambda module, **_: module, False)
    optimizer = make(model.parameters())
    for name, param in model.named_parameters():
        if name not in unused:
            param.grad = torch.rand_like(param)
    optimizer.step()
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    states = optimizer.state_dict()
    groups = [{**group, "params": [names[at] for at in group["params"]]} for group in states["param_groups"]]
    return {"state": {names[at]: row for at, row in states["state"].items()}, "param_groups": groups}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@ORIG_PARAMS
@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(2)
def test_a_parameter_without_momentum_has_none_after_the_load(
    use_orig_params: bool, rank0_only: bool, rank: int
) -> None:
    states = saved_plainly(sgd, "0.bias")
    model = layers(by_us, use_orig_params)
    optimizer = sgd(model.parameters())
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(rank0_only=rank0_only)
    ):
        given = states if rank == 0 or not rank0_only else {}
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(given))
    with peer_warnings_silenced():
        peer = layers(peer_fsdp, use_orig_params)
        theirs = PeerFSDP.optim_state_dict_to_load(peer, sgd(peer.parameters()), copy.deepcopy(states))
    if use_orig_params or not rank0_only:
        assert_equal(loaded["state"], theirs["state"])
    optimizer.load_state_dict(loaded)
    found = FSDP.optim_state_dict(model, optimizer)["state"]
    if not use_orig_params:
        # Zeros say the same to SGD.
        assert not found.pop("0.bias")["momentum_buffer"].any()
    assert_equal(found, states["state"])


@pytest.mark.parametrize("unused", ["0.weight", "0.bias"])
@on_ranks(2)
def test_counts_that_differ_inside_a_flat_parameter_are_refused_with_names(unused: str) -> None:
    model = layers(by_us, False)
    optimizer = torch.optim.Adam(model.parameters())
    states = saved_plainly(torch.optim.Adam, unused)
    with pytest.raises(OptionError, match=rf"of unit 'Linear'.* 'step'.* nothing for '{unused}'"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)
    states = saved_plainly(torch.optim.Adam)
    states["state"][unused]["step"] += 1
    with pytest.raises(OptionError, match=r"of unit 'Linear'.* 'step'.* (1\.0.*2\.0|2\.0.*1\.0)"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)
    peer = layers(peer_fsdp, False)
    with peer_warnings_silenced(), pytest.raises(ValueError, match="same value"):
        PeerFSDP.optim_state_dict_to_load(peer, torch.optim.Adam(peer.parameters()), states)


@on_ranks(2)
def test_dtypes_that_differ_inside_a_flat_parameter_are_refused_with_names() -> None:
    model = layers(by_us, False)
    states = saved_plainly(sgd)
    states["state"]["0.bias"]["momentum_buffer"] = states["state"]["0.bias"]["momentum_buffer"].double()
    with pytest.raises(OptionError, match=r"of unit 'Linear'.* 'momentum_buffer'.*float32.*float64"):
        FSDP.optim_state_dict_to_load(model, sgd(model.parameters()), states)


@ORIG_PARAMS
@on_ranks(2)
def test_an_optimizer_of_a_part_and_of_an_outside_parameter_loads_from_states_of_the_whole(
    use_orig_params: bool,
) -> None:
    model = layers(by_us, use_orig_params)
    outside = nn.Parameter(torch.ones(2))
    states = saved_plainly(torch.optim.Adam)
    second = [name for name in states["state"] if name.startswith("1.")]
    states["param_groups"][0]["params"] = second
    optimizer = torch.optim.Adam([outside, *model[1].parameters()])
    with pytest.warns(UserWarning, match=r"parameter\(s\) that this optimizer does not hold, '0\."):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(states))
    with peer_warnings_silenced():
        peer = layers(peer_fsdp, use_orig_params)
        theirs = PeerFSDP.optim_state_dict_to_load(
            peer, torch.optim.Adam([outside, *peer[1].parameters()]), copy.deepcopy(states)
        )
    # FSDP1 keeps states that the optimizer does not hold, under keys of its own.
    own = {at: row for at, row in theirs["state"].items() if isinstance(at, int)}
    assert_equal(loaded["state"], own)
    assert [group["params"] for group in loaded["param_groups"]] == [
        group["params"] for group in theirs["param_groups"]
    ]


def test_names_become_positions_of_an_optimizer_that_holds_an_outside_parameter() -> None:
    model = layers(lambda module, **_: module, False)
    states = saved_plainly(torch.optim.Adam)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2)), *model.parameters()])
    found = FSDP.rekey_optim_state_dict(copy.deepcopy(states), OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    theirs = PeerFSDP.rekey_optim_state_dict(copy.deepcopy(states), PeerKeyType.PARAM_ID, model, optim=optimizer)
    assert_equal(found, theirs)
    assert sorted(found["state"]) == [1, 2, 3, 4]
    named = FSDP.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
    assert_equal(named["state"], states["state"])
    found["state"][0] = {"step": torch.tensor(1.0)}
    with pytest.raises(OptionError, match=r"Key 0 .* belongs to no parameter of this model"):
        FSDP.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)


@on_ranks(2)
def test_groups_of_optim_input_without_parameters_are_refused_as_by_fsdp1() -> None:
    states = saved_plainly(torch.optim.Adam)
    for fsdp, wrap in ((PeerFSDP, peer_fsdp), (FSDP, by_us)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = layers(wrap, True)
            with pytest.raises(AssertionError, match="param"):
                fsdp.shard_full_optim_state_dict(states, model, optim_input=[{"lr": 1.0}])


@pytest.mark.parametrize("unused", ["0.weight", "0.bias"])
@on_ranks(2)
def test_a_checkpoint_of_original_parameters_resumes_in_flat_ones(unused: str, tmp_path: Path) -> None:
    model, target = layers(by_us, True), layers(by_us, False)
    optimizer = sgd(model.parameters())
    named = {clean_fqn(name): param for name, param in model.named_parameters()}
    for name, param in named.items():
        param.grad = None if name == unused else torch.ones_like(param)
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)["state"]
    assert unused not in saved
    save_checkpoint(tmp_path, model, optimizer)
    resumed = sgd(target.parameters())
    load_checkpoint(tmp_path, target, resumed)
    found = FSDP.optim_state_dict(target, resumed)["state"]
    assert not found.pop(unused)["momentum_buffer"].any()
    assert_equal(found, saved)
