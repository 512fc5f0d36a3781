"""What a load without the optimizer leaves out is logged, and optimizers of other models than the present one raise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType, StateDictType, fully_shard, load_checkpoint, save_checkpoint, unwrap
from fsdp_flat.errors import UsageError
from tests.support import assert_equal, on_ranks

SIDES = pytest.mark.parametrize("side", ["originals", "flat", "fully_shard"])


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def sharded(side: str, model: nn.Module | None = None) -> nn.Module:
    model = plain() if model is None else model
    if side != "fully_shard":
        return FSDP(model, use_orig_params=side == "originals")
    fully_shard(model)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, 6)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def logged() -> Iterator[list[str]]:
    """Provide the texts of this rank's warnings in the log inside the block."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_flat").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("fsdp_flat").removeHandler(handler)


@SIDES
@on_ranks(2)
def test_a_load_without_the_optimizer_says_which_states_it_leaves_out(side: str, tmp_path: Path, rank: int) -> None:
    """Saved states were dropped without a word."""
    model = sharded(side)
    optimizer = adam(model)
    step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer)
    with logged() as texts:
        load_checkpoint(tmp_path, model, optimizer)
        assert texts == []
        load_checkpoint(tmp_path, model)
    told = "has an optimizer's states (exp_avg, exp_avg_sq, step, of 4 parameters) and settings, which are left out"
    assert [told in text and "load_checkpoint(directory, model, optim)" in text for text in texts] == (
        [True] if rank == 0 else []
    )


@on_ranks(2)
def test_a_load_of_a_checkpoint_without_optimizer_says_nothing(tmp_path: Path) -> None:
    """Nothing is left out."""
    model = sharded("originals")
    save_checkpoint(tmp_path, model)
    with logged() as texts:
        load_checkpoint(tmp_path, model)
    assert texts == []


@SIDES
@on_ranks(2)
def test_an_optimizer_from_before_unwrap_raises_at_its_next_step(side: str) -> None:
    """It held parameters that no module has any more, or states of shards."""
    model = sharded(side)
    optimizer = adam(model)
    step(model, optimizer)
    whole = unwrap(model)
    told = r"Adam has a state 'exp_avg' of shape \(\d+,\)" if side == "originals" else "Adam holds parameters of unit"
    with pytest.raises(UsageError, match=f"{told}.*unwrap.*Build an optimizer from the parameters"):
        optimizer.step()
    step(whole, adam(whole))


@on_ranks(2)
def test_an_optimizer_without_states_goes_on_after_unwrap() -> None:
    """With original parameters the objects stay the same, so this program is right."""
    model, twin = sharded("originals"), plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = unwrap(model)
    step(whole, optimizer)
    step(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert_equal(whole.state_dict(), twin.state_dict())


@SIDES
@on_ranks(2)
def test_states_go_from_before_unwrap_to_an_optimizer_of_the_plain_model(side: str) -> None:
    """What the error says works."""
    model, twin = sharded(side), plain()
    optimizer, expected = adam(model), adam(twin)
    step(model, optimizer)
    step(twin, expected)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)
    whole = unwrap(model)
    new = adam(whole)
    new.load_state_dict(FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, whole))
    step(whole, new)
    step(twin, expected)
    assert_equal(whole.state_dict(), twin.state_dict())


@pytest.mark.parametrize("side", ["flat", "fully_shard"])
@on_ranks(2)
def test_an_optimizer_from_before_sharding_raises_at_its_first_step(side: str) -> None:
    """An optimizer made before wrapping, and before fully_shard."""
    model = plain()
    optimizer = adam(model)
    held = sharded(side, model)
    with pytest.raises(UsageError, match=r"Adam holds .* of unit .*, so its steps change nothing\. Build the"):
        step(held, optimizer)
