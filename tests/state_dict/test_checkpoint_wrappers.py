"""State dicts of models with activation-checkpoint wrappers inside of units, around them, or put in after wrapping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, load_full, save_checkpoint, save_full
from tests.state_dict.kit import FULL, LOCAL, ON_DEVICE, SHARDED
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import train_on
from tests.support.models import BufferedBlock
from tests.support.wrapper_models import batch, seeded, shard

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    # torch says so of a re-entrant checkpoint inside another one, whose first forward runs without gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
Put = Callable[[nn.Module], nn.Module]


def inside(model: nn.Module, put: Put, **options: Any) -> nn.Module:
    """Units hold checkpoint wrappers: those of the blocks, and that of the model."""
    for index in range(2):
        model.blocks[index] = shard(put(model.blocks[index]), by_blocks=False, **options)
    return shard(put(model), by_blocks=False, **options)


def around(model: nn.Module, put: Put, **options: Any) -> nn.Module:
    """Checkpoint wrappers hold units: those of the blocks, and that of the model; the outermost module is no unit."""
    for index in range(2):
        model.blocks[index] = put(shard(model.blocks[index], by_blocks=False, **options))
    return put(shard(model, by_blocks=False, **options))


def afterwards(model: nn.Module, put: Put, **options: Any) -> nn.Module:
    """Checkpoint wrappers are put into units that exist."""
    wrapped = shard(model, **options)
    apply_activation_checkpointing(
        wrapped, checkpoint_wrapper_fn=put, check_fn=lambda module: isinstance(module, (BufferedBlock, nn.Linear))
    )
    return wrapped


PLACES = {"inside": inside, "around": around, "afterwards": afterwards}
PUTS: dict[str, Put] = {
    "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "not reentrant": checkpoint_wrapper,
    "offloaded": offload_wrapper,
}


def trained(place: str, put: str, rank: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after one step, so that weights and optimizer states differ from those of a new one."""
    model = PLACES[place](seeded(), PUTS[put], **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    # A re-entrant checkpoint around the model has no backward unless an input needs a gradient.
    train_on(model, optimizer, [batch(rank).requires_grad_()])
    return model, optimizer


def new(place: str, put: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = PLACES[place](seeded(seed=1), PUTS[put], **options)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Both halves as whole tensors. Every rank must call this."""
    with FSDP.state_dict_type(model, FULL):
        return dict(model.state_dict()), FSDP.optim_state_dict(model, optimizer)


@ORIG_PARAMS
@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_state_dicts_of_every_form_are_saved_and_loaded_under_the_plain_names(
    place: str, use_orig_params: bool, rank: int
) -> None:
    plain = seeded()
    for put in PUTS:
        source = trained(place, put, rank, use_orig_params=use_orig_params)
        saved = full(*source)
        assert list(saved[0]) == list(plain.state_dict())
        assert set(saved[1]["state"]) == {name for name, _ in plain.named_parameters()}
        plain.load_state_dict(saved[0])
        for form in (FULL, SHARDED, LOCAL):
            target = new(place, put, use_orig_params=use_orig_params)
            with FSDP.state_dict_type(source[0], form, None, ON_DEVICE[form]):
                state, states = source[0].state_dict(), FSDP.optim_state_dict(*source)
            with FSDP.state_dict_type(target[0], form, None, ON_DEVICE[form]):
                target[0].load_state_dict(state)
                target[1].load_state_dict(FSDP.optim_state_dict_to_load(*target, states))
            assert_equal(full(*target), saved)


@ORIG_PARAMS
@on_ranks(2)
def test_units_of_compiled_modules_and_of_wrappers_in_wrappers_load_every_form(use_orig_params: bool) -> None:
    for put in (
        partial(torch.compile, backend="eager"),
        lambda module: checkpoint_wrapper(torch.compile(offload_wrapper(module), backend="eager")),
    ):
        source, target = (inside(seeded(seed=seed), put, use_orig_params=use_orig_params) for seed in (0, 1))
        saved = dict(source.state_dict())
        assert_equal(saved, dict(seeded().state_dict()))
        for form in (FULL, SHARDED, LOCAL):
            with FSDP.state_dict_type(source, form):
                state = source.state_dict()
            with FSDP.state_dict_type(target, form):
                target.load_state_dict(state)
            assert_equal(dict(target.state_dict()), saved)
            target.load_state_dict(seeded(seed=1).state_dict())


@ORIG_PARAMS
@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_a_state_dict_moves_between_models_with_and_without_checkpoint_wrappers(
    place: str, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    source = trained(place, "not reentrant", rank, use_orig_params=use_orig_params)
    save_checkpoint(tmp_path / "run", *source).wait()
    save_full(source[0], tmp_path / "full")
    saved = full(*source)
    with FSDP.state_dict_type(source[0], SHARDED):
        state, states = source[0].state_dict(), FSDP.optim_state_dict(*source)
    model = shard(seeded(seed=1), use_orig_params=use_orig_params)
    unwrapped = (model, torch.optim.Adam(model.parameters(), lr=0.1))
    targets = [new(other, "not reentrant", use_orig_params=use_orig_params) for other in PLACES]
    for target in (*targets, unwrapped):
        with FSDP.state_dict_type(target[0], SHARDED):
            target[0].load_state_dict(state)
            target[1].load_state_dict(FSDP.optim_state_dict_to_load(*target, states))
        assert_equal(full(*target), saved)
    target = new(place, "not reentrant", use_orig_params=use_orig_params)
    load_checkpoint(tmp_path / "run", *target)
    assert_equal(full(*target), saved)
    target = new(place, "not reentrant", use_orig_params=use_orig_params)
    load_full(target[0], tmp_path / "full")
    assert_equal(full(*target)[0], saved[0])


@ORIG_PARAMS
@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_a_refused_load_names_plain_names_and_changes_nothing(place: str, use_orig_params: bool, rank: int) -> None:
    model, optimizer = trained(place, "not reentrant", rank, use_orig_params=use_orig_params)
    before = full(model, optimizer)
    state = dict(before[0])
    state["blocks.0.down.wait"] = state.pop("blocks.0.down.weight")
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert all(f'"{name}"' in text for name in ("blocks.0.down.weight", "blocks.0.down.wait")), text
    assert not any(word in text for word in ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")), text
    keys = model.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["blocks.0.down.weight"], ["blocks.0.down.wait"])
    wrong = {**before[0], "blocks.1.up.bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.up\.bias"):
        model.load_state_dict(wrong)
    assert_equal(full(model, optimizer), before)
