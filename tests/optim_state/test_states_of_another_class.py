"""Optimizer states of another class raise with both classes and the keys in every loading path."""

from __future__ import annotations

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
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.api import FullOptimStateDictConfig
from fsdp_flat.errors import OptionError
from fsdp_flat.state import optim_load
from tests.state_dict.kit import FULL, LOCAL, ON_DEVICE, SHARDED
from tests.support import assert_equal, on_ranks
from tests.support.beside import blocks_and_root
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import seeded, shard, shard_by_peer, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    # Of torch's FSDP1.
    pytest.mark.filterwarnings("ignore:.*_get_pg_default_device:UserWarning"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning"),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
PAIRS = pytest.mark.parametrize(("saved", "other"), [("AdamW", "SGD"), ("SGD", "AdamW")])
ADAM = r"\['exp_avg', 'exp_avg_sq', 'step'\]"
TEXTS = {
    "SGD": rf"those of '.*' are {ADAM}, which .*AdamW.* keeps, and this optimizer is SGD, which needs \['momentum_buf",
    "AdamW": rf"are \['momentum_buffer'\], which .*SGD keeps, and this optimizer is AdamW, which needs {ADAM}",
}


FRONTS: dict[str, Callable[[Any], Any]] = {
    "flat": lambda model: shard(model, use_orig_params=False),
    "originals": lambda model: shard(model, use_orig_params=True),
    "fully_shard": blocks_and_root,
}


def trained(front: str, rank: int, make: Callable[..., torch.optim.Optimizer]) -> tuple[Any, torch.optim.Optimizer]:
    model = FRONTS[front](seeded())
    optimizer = make(model.parameters())
    train(model, optimizer, rank, range(2))
    return model, optimizer


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("front", FRONTS)
@PAIRS
@on_ranks(2)
def test_every_loading_path_names_both_classes_and_the_keys(
    saved: str, other: str, front: str, is_fresh: bool, rank: int, tmp_path: Path
) -> None:
    model, optimizer = trained(front, rank, OPTIMIZERS[saved])
    save_checkpoint(tmp_path, model, optimizer)
    target = OPTIMIZERS[other](model.parameters())
    if not is_fresh:
        train(model, target, rank, range(1))
    before = copy.deepcopy(target.state_dict())
    paths: list[Callable[[], object]] = [lambda: load_checkpoint(tmp_path, model, target)]
    for kind in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind, None, ON_DEVICE[kind]):
            states = FSDP.optim_state_dict(model, optimizer)
        alone = {"state": states["state"]}
        for given in (states, alone):
            for direct in (False, True)[: 1 + (given is states)]:

                def load(kind: Any = kind, given: Any = given, direct: bool = direct) -> None:
                    with FSDP.state_dict_type(model, kind, None, ON_DEVICE[kind]):
                        FSDP.optim_state_dict_to_load(model, target, copy.copy(given), load_directly=direct)

                paths.append(load)
    full = FSDP.optim_state_dict(model, optimizer)

    def from_rank_zero() -> None:
        with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
            FSDP.optim_state_dict_to_load(model, target, {} if rank else full)

    def older(name: str, given: Any) -> Callable[[], object]:
        return lambda: getattr(FSDP, name)(given, model, optim=target)

    paths += [from_rank_zero, older("shard_full_optim_state_dict", full), older("scatter_full_optim_state_dict", full)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*optim_state_dict", category=FutureWarning)
        paths.append(older("flatten_sharded_optim_state_dict", FSDP.sharded_optim_state_dict(model, optimizer)))
        for at, path in enumerate(paths):
            with pytest.raises(OptionError, match=TEXTS[other]):
                path()
            assert_equal(target.state_dict(), before, what=f"path {at}")


RIGHT: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "a fresh optimizer of the same class": (OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW"]),
    "amsgrad switched on": (OPTIMIZERS["AdamW"], lambda params: torch.optim.AdamW(params, amsgrad=True)),
    "amsgrad switched off": (lambda params: torch.optim.AdamW(params, amsgrad=True), OPTIMIZERS["AdamW"]),
    "Adam's into AdamW": (torch.optim.Adam, torch.optim.AdamW),
    "AdamW's into RAdam": (torch.optim.AdamW, torch.optim.RAdam),
    "momentum from SGD without": (lambda params: torch.optim.SGD(params, lr=0.1), OPTIMIZERS["SGD"]),
    "SGD with momentum into one without": (OPTIMIZERS["SGD"], lambda params: torch.optim.SGD(params, lr=0.1)),
    "RMSprop with other options": (
        lambda params: torch.optim.RMSprop(params, momentum=0.5),
        lambda params: torch.optim.RMSprop(params, centered=True),
    ),
}


@pytest.mark.parametrize("front", ["flat", "originals"])
@pytest.mark.parametrize("which", RIGHT)
@on_ranks(2)
def test_what_is_right_on_fsdp1_loads_and_steps_alike(which: str, front: str, rank: int) -> None:
    found = []
    for fsdp, wrap in ((PeerFSDP, shard_by_peer), (FSDP, shard)):
        before, after = RIGHT[which]
        with peer_warnings_silenced():
            model: Any = wrap(seeded(), use_orig_params=front == "originals")
            optimizer = before(model.parameters())
            train(model, optimizer, rank, range(2))
            states = fsdp.optim_state_dict(model, optimizer)
            target = after(model.parameters())
            target.load_state_dict(fsdp.optim_state_dict_to_load(model, target, states))
            found.append(train(model, target, rank, range(2, 4)))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@on_ranks(2)
def test_states_alone_go_into_sgd_without_momentum(rank: int) -> None:
    model, optimizer = trained("originals", rank, OPTIMIZERS["AdamW"])
    target = torch.optim.SGD(model.parameters(), lr=0.1)
    loaded = FSDP.optim_state_dict_to_load(model, target, {"state": FSDP.optim_state_dict(model, optimizer)["state"]})
    target.load_state_dict({**target.state_dict(), "state": loaded["state"]})
    train(model, target, rank, range(1))


@on_ranks(2)
def test_a_client_that_hands_over_its_own_optimizer_meets_the_error_too(rank: int) -> None:
    class Prepared(torch.optim.Optimizer):
        """Shows another optimizer, as accelerate's does."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

    model, optimizer = trained("originals", rank, OPTIMIZERS["AdamW"])
    states = FSDP.optim_state_dict(model, Prepared(optimizer))
    with pytest.raises(OptionError, match=TEXTS["SGD"]):
        FSDP.optim_state_dict_to_load(model, Prepared(OPTIMIZERS["SGD"](model.parameters())), states)


@on_ranks(2)
def test_optimizers_of_two_classes_load_their_parts_of_one_state_dict(rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    inside = [param for name, param in model.named_parameters() if "blocks" in name]
    outside = [param for name, param in model.named_parameters() if "blocks" not in name]
    both = OPTIMIZERS["AdamW"](inside), OPTIMIZERS["SGD"](outside)
    for optimizer in both:
        train(model, optimizer, rank, range(1))
    merged: dict[str, Any] = {"state": {}}
    for optimizer in both:
        merged["state"] |= FSDP.optim_state_dict(model, optimizer)["state"]
    for optimizer in both:
        with pytest.warns(UserWarning, match="that this optimizer does not hold"):
            FSDP.optim_state_dict_to_load(model, optimizer, merged)


def test_the_table_says_what_each_of_torchs_optimizers_keeps() -> None:
    for name, states in optim_load._STATES.items():
        make = getattr(torch.optim, name, None)
        if make is None:
            # Muon is new in torch 2.9.
            assert name == "Muon"
            continue
        param = nn.Parameter(torch.ones(2, 2))
        optimizer = make([param], lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
        param.grad = torch.ones(2, 2).to_sparse() if name == "SparseAdam" else torch.ones(2, 2)
        optimizer.step()
        assert set(optimizer.state[param]) == states, name
