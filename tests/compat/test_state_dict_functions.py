"""torch.distributed.checkpoint.state_dict with our wrapper after install(): every option, against the peer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fsdp_flat
from fsdp_flat.errors import UsageError
from tests.support import assert_close, on_ranks
from tests.support.kit import train_on
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer

ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
OPTIONS = {
    "sharded": {},
    "sharded_on_the_cpu": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full_on_rank_0": {"full_state_dict": True, "cpu_offload": True},
    "full_flat_keys": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "full_trainable_only": {"full_state_dict": True, "ignore_frozen_params": True},
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of its own ShardedTensor, groups and FSDP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(wrap: Any, *, orig: bool, seed: int = 0, steps: int = 2, frozen: bool = False, **kwargs: Any) -> Any:
    """A wrapped model and its optimizer after some steps."""
    model = seeded(seed=seed)
    if frozen:
        model.blocks[0].requires_grad_(False)
    model = wrap(model, use_orig_params=orig, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    return [loss.item() for loss in train_on(model, optimizer, [batch(dist.get_rank(), step) for step in steps])]


def plain(value: Any) -> Any:
    """ShardedTensors as lists of (offsets, tensor), so that values of both libraries compare."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if hasattr(value, "local_shards"):
        return [(list(piece.metadata.shard_offsets), piece.tensor.detach()) for piece in value.local_shards()]
    return value.detach() if isinstance(value, torch.Tensor) else value


def sorted_keys(value: Any) -> Any:
    """Dicts in the order of keys; names of parameter groups sorted."""
    if isinstance(value, dict):
        return {
            key: sorted(entry) if key == "params" else sorted_keys(entry)
            for key, entry in sorted(value.items(), key=lambda pair: str(pair[0]))
        }
    return [sorted_keys(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", list(OPTIONS))
@ORIG
@on_ranks(2)
def test_what_the_functions_return_is_what_they_return_for_the_peer(name: str, orig: bool, rank: int) -> None:
    options = StateDictOptions(**OPTIONS[name])
    frozen = options.ignore_frozen_params
    with quiet():
        # On its way to the CPU the peer's full optimizer state overwrites itself, so it stays where it is there.
        other_options = StateDictOptions(**{**OPTIONS[name], "cpu_offload": name == "sharded_on_the_cpu"})
        theirs = get_state_dict(*trained(shard_by_peer, orig=orig, frozen=frozen), options=other_options)
        if name == "full_on_rank_0" and rank == 1:
            theirs = ({}, {})
        with fsdp_flat.installed():
            ours = get_state_dict(*trained(shard, orig=orig, frozen=frozen), options=options)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(sorted_keys(plain(mine)), sorted_keys(plain(other)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*OPTIONS, "full_from_rank_0"])
@ORIG
@on_ranks(2)
def test_a_new_model_goes_on_where_the_saved_one_was(name: str, orig: bool, rank: int) -> None:
    given = {"full_state_dict": True, "broadcast_from_rank0": True} if name == "full_from_rank_0" else OPTIONS[name]
    options = StateDictOptions(**given)
    frozen = options.ignore_frozen_params
    with quiet(), fsdp_flat.installed():
        model, optimizer = trained(shard, orig=orig, frozen=frozen)
        model_state, optim_state = get_state_dict(model, optimizer, options=options)
        if name == "full_on_rank_0":
            # Only rank 0 has it now, so it has to be sent from there.
            assert bool(model_state) is bool(optim_state.get("state")) is (rank == 0)
            options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
        elif name == "full_from_rank_0" and rank == 1:
            model_state, optim_state = {}, {}
        fresh, fresh_optimizer = trained(shard, orig=orig, seed=5, steps=0, frozen=frozen)
        if frozen:
            # What was left out of the save comes from elsewhere, here from the same start.
            options = StateDictOptions(full_state_dict=True, strict=False)
            fresh, fresh_optimizer = trained(shard, orig=orig, seed=0, steps=0, frozen=True)
        if options.broadcast_from_rank0:
            # set_state_dict takes an empty dict for one that is not to be loaded.
            set_model_state_dict(fresh, model_state, options=options)
            set_optimizer_state_dict(fresh, fresh_optimizer, optim_state, options=options)
        else:
            set_state_dict(
                fresh, fresh_optimizer, model_state_dict=model_state, optim_state_dict=optim_state, options=options
            )
        assert train(fresh, fresh_optimizer, range(2, 4)) == train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("keep", [True, False])
@on_ranks(2)
def test_a_submodules_state_has_its_prefix_or_not(keep: bool) -> None:
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keep)
    with quiet(), fsdp_flat.installed():
        model, _ = trained(shard, orig=True)
        (block,) = [module for name, module in model.named_modules() if name.endswith("blocks.1")]
        found = get_model_state_dict(model, submodules={block}, options=options)
        prefix = "blocks.1." if keep else ""
        assert sorted(found) == [f"{prefix}{name}" for name in ("down.weight", "shift", "up.bias", "up.weight")]
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_close(found[f"{prefix}up.weight"], whole["blocks.1.up.weight"], rtol=0, atol=0)


@ORIG
@on_ranks(2)
def test_strict_decides_what_a_missing_name_does(orig: bool) -> None:
    with quiet(), fsdp_flat.installed():
        model, _ = trained(shard, orig=orig)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        del state["blocks.1.up.weight"]
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"):
            set_model_state_dict(model, dict(state), options=StateDictOptions())
        report = set_model_state_dict(model, dict(state), options=StateDictOptions(strict=False))
        assert report.missing_keys == ["blocks.1.up.weight"]


@on_ranks(4)
def test_hybrid_sharding_is_saved_and_loaded() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with quiet(), fsdp_flat.installed():
        for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
            model, optimizer = trained(shard, orig=True, strategy="HYBRID_SHARD", device_mesh=mesh)
            states = get_state_dict(model, optimizer, options=options)
            fresh, fresh_optimizer = trained(
                shard, orig=True, seed=5, steps=0, strategy="HYBRID_SHARD", device_mesh=mesh
            )
            set_state_dict(
                fresh, fresh_optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
            )
            assert train(fresh, fresh_optimizer, range(2, 4)) == train(model, optimizer, range(2, 4))


@ORIG
@on_ranks(2)
def test_without_install_they_raise_instead_of_giving_slices(orig: bool) -> None:
    model, optimizer = trained(shard, orig=orig)
    before = plain(dict(model.state_dict()))
    full = StateDictOptions(full_state_dict=True)
    calls: list[Callable[[nn.Module], Any]] = [
        lambda which: get_model_state_dict(which, options=full),
        lambda which: get_model_state_dict(which),
        lambda which: get_optimizer_state_dict(which, optimizer, options=full),
        lambda which: get_optimizer_state_dict(which, optimizer),
        lambda which: get_state_dict(which, optimizer),
        lambda which: set_model_state_dict(which, {"first.weight": torch.ones(1)}, options=full),
        lambda which: set_optimizer_state_dict(which, optimizer, {"state": {}, "param_groups": []}),
    ]
    for which in (model, nn.Sequential(model), model.blocks[1]):
        for call in calls:
            with quiet(), pytest.raises(UsageError, match=r"fsdp_flat\.install\(\) first"):
                call(which)
    assert_close(plain(dict(model.state_dict())), before, rtol=0, atol=0)
    # Other models are none of the wrapper's business, and with install() they know it.
    assert list(get_model_state_dict(seeded())) == list(seeded().state_dict())
    with fsdp_flat.installed(), quiet():
        assert_close(plain(get_model_state_dict(model, options=full)), before, rtol=0, atol=0)
        found = get_optimizer_state_dict(model, optimizer, options=full)
        assert_close(found["state"], model.optim_state_dict(model, optimizer)["state"], rtol=0, atol=0)
