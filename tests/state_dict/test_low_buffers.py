"""Buffers that compute in a lower dtype (``buffer_dtype``) are saved in their own, with the values of compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision as PeerMixedPrecision

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, load_checkpoint, load_full, save_checkpoint, save_full
from tests.state_dict.kit import FULL, LOCAL, SHARDED
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.models import BufferedBlock, Model
from tests.support.peer import peer_fsdp
from tests.support.wrapper_models import batch, seeded, shard

LOW = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Aliased(Model):
    """A block has a second name, and two modules of a unit share one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = BufferedBlock()
        self.once_more = self.again
        self.again.register_buffer("same", self.again.shift)


def ran(rank: int, seed: int, **options: object) -> FSDP:
    """A model whose buffers are low, since it has run."""
    model = shard(seeded(Aliased, seed), by_blocks=False, mixed_precision=LOW, **options)
    model(batch(rank))
    assert {buffer.dtype for buffer in model.buffers()} == {torch.bfloat16}
    return model


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    names = [name for name, _ in seeded(Aliased).named_buffers(remove_duplicate=False)]
    return {name: value.clone() for name, value in model.state_dict().items() if name in names}


def rounded_buffers(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16().float() for name, value in saved_buffers(seeded(Aliased, seed)).items()}


@ORIG_PARAMS
@on_ranks(2)
def test_rounded_buffers_are_saved_and_loaded_in_their_registered_dtype(
    use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    model = ran(rank, 0, use_orig_params=use_orig_params)
    other = ran(rank, 1, use_orig_params=use_orig_params)
    for form in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, form):
            assert_equal(saved_buffers(model), rounded_buffers(0))
            state = model.state_dict()
        with FSDP.state_dict_type(other, form):
            other.load_state_dict(state)
        assert {buffer.dtype for buffer in other.buffers()} == {torch.bfloat16}
        for _ in range(2):
            assert_equal(saved_buffers(other), rounded_buffers(0))
            other(batch(rank))
        other.load_state_dict(seeded(Aliased, 1).state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            other.load_state_dict({name: value + 1 for name, value in rounded_buffers(0).items()})
        assert_equal(saved_buffers(other), rounded_buffers(1))
    save_checkpoint(tmp_path / "run", model)
    save_full(model, tmp_path / "full")
    load_checkpoint(tmp_path / "run", other)
    assert_equal(saved_buffers(other), rounded_buffers(0))
    other.load_state_dict(seeded(Aliased, 1).state_dict())
    load_full(other, tmp_path / "full")
    assert {buffer.dtype for buffer in other.buffers()} == {torch.bfloat16}
    assert_equal(saved_buffers(other), rounded_buffers(0))
    assert_equal(saved_buffers(fsdp_flat.unwrap(other)), rounded_buffers(0))


@on_ranks(2)
def test_elements_that_compute_has_changed_are_saved_as_they_are_in_compute(rank: int) -> None:
    model = ran(rank, 0)
    low = model.module.again.shift
    with torch.no_grad():
        low[1] += 1
    expected = rounded_buffers(0)
    for name in ("again.shift", "again.same", "once_more.shift", "once_more.same"):
        expected[name][1] = low[1].float()
    assert_equal(saved_buffers(model), expected)
    model.module.again.shift = torch.full_like(low, 2.5)
    for name in ("again.shift", "once_more.shift"):
        expected[name] = torch.full_like(expected[name], 2.5)
    assert_equal(saved_buffers(model), expected)


@ORIG_PARAMS
@on_ranks(2)
def test_a_full_state_dict_has_the_buffers_of_fsdp1s(use_orig_params: bool, rank: int) -> None:
    found = []
    for side, precision in ((FSDP, MixedPrecision), (peer_fsdp, PeerMixedPrecision)):
        low = precision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = side(seeded(), mixed_precision=low, use_orig_params=use_orig_params)
        model(batch(rank))
        state = model.state_dict()
        found.append({name: state[name].clone() for name, _ in seeded().named_buffers() if name in state})
        model.load_state_dict({**state, **{name: value + 0.3 for name, value in found[-1].items()}})
        found.append({name: model.state_dict()[name].clone() for name in found[-1]})
    assert_equal(found[:2], found[2:])
    assert {value.dtype for value in found[0].values()} == {torch.float32}
