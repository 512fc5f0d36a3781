"""A new state-dict type is an enum member, two config classes, a codec and a table row.

One toy type has values of its own kind; the other has full tensors in another form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType
from fsdp_flat.api import FullStateDictConfig, OptimStateDictConfig, StateDictConfig
from fsdp_flat.core import TensorAdapter
from fsdp_flat.errors import LoadError
from fsdp_flat.state import CodecRow, PendingWrites, StateDictCodec, StateShard, codecs
from fsdp_flat.state.codecs import FullCodec
from tests.state_dict.kit import FULL, OPTIMIZERS, TASKS, save, train
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.wrapper_models import seeded, shard, whole_state


@dataclass(frozen=True)
class Negated:
    """The value of the toy type: this rank's elements, negated, in float64, and their place in the tensor."""

    elements: torch.Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32  # of what it is decoded into


@dataclass
class NegatedConfig(StateDictConfig):
    """Options for models."""


@dataclass
class NegatedOptimConfig(OptimStateDictConfig):
    """Options for optimizers."""


class NegatedCodec(StateDictCodec):
    """Encodes each rank's own elements, so that nothing is communicated."""

    communicates = False
    kinds = (Negated,)

    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        return [Negated(-shard.local.double(), shard.interval.start, shard.full_shape) for shard in shards]

    def decode(self, value: Any, target: StateShard, writes: PendingWrites) -> None:
        if (value.start, value.elements.shape) != (target.interval.start, target.local.shape):
            raise LoadError(f"{target.label}: elements of another rank.")
        writes.copy(target.local, -value.elements)


@dataclass
class HalfConfig(StateDictConfig):
    """Options for models."""

    rank0_only: bool = False


@dataclass
class HalfOptimConfig(OptimStateDictConfig):
    """Options for optimizers."""

    rank0_only: bool = False


class HalfCodec(FullCodec):
    """Encodes full tensors in bfloat16."""

    def stored(self, tensor: torch.Tensor, adapter: TensorAdapter, config: Any) -> torch.Tensor:
        return super().stored(tensor.bfloat16(), adapter, config)


class ElsewhereCodec(StateDictCodec):
    """Encodes full tensors for rank 0, without an option that says so."""

    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        return codecs.FULL.encode(shards, FullStateDictConfig(config.offload_to_cpu, rank0_only=True))


NEGATED = CodecRow(NegatedCodec(), NegatedCodec(), NegatedConfig, NegatedOptimConfig)
HALF = CodecRow(HalfCodec(), HalfCodec(), HalfConfig, HalfOptimConfig)


ELSEWHERE = CodecRow(ElsewhereCodec(), ElsewhereCodec(), StateDictConfig, OptimStateDictConfig)


@contextmanager
def registered(row: CodecRow) -> Iterator[StateDictType]:
    """Add an enum member and its table row inside the block."""
    member = object.__new__(StateDictType)
    member._name_, member._value_ = "TOY_STATE_DICT", 99
    members: dict[str, Any] = StateDictType._member_map_  # type: ignore[assignment]
    with (
        mock.patch.dict(members, {member.name: member}),
        mock.patch.object(codecs, "CODECS", MappingProxyType({**codecs.CODECS, member: row})),
    ):
        yield member


Trained = tuple[FSDP, torch.optim.Optimizer]


def two_trained(use_orig_params: bool) -> tuple[Trained, Trained]:
    """Return two models with their optimizers, of other weights and another number of steps."""

    def trained(seed: int) -> Trained:
        model = shard(seeded(seed=seed), use_orig_params=use_orig_params)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        train(model, optimizer, TASKS["uneven"], range(1 + seed))
        return model, optimizer

    return trained(0), trained(1)


@ORIG_PARAMS
@on_ranks(2)
def test_a_toy_type_saves_and_loads_a_model_and_adam(use_orig_params: bool) -> None:
    (model, optimizer), (other, other_optimizer) = two_trained(use_orig_params)
    expected = whole_state(model), save(model, optimizer, FULL)[1]["state"]
    with registered(NEGATED) as negated:
        with FSDP.state_dict_type(model, negated):
            state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        assert isinstance(state["first.weight"], Negated)
        assert all(isinstance(row["exp_avg"], Negated) for row in states["state"].values())
        with FSDP.state_dict_type(other, negated):
            other.load_state_dict(state)
            loaded = FSDP.optim_state_dict_to_load(other, other_optimizer, states)
        assert all(row["exp_avg"].dtype is torch.float32 for row in loaded["state"].values())
        other_optimizer.load_state_dict(loaded)
    assert_equal(whole_state(other), expected[0])
    assert_equal(save(other, other_optimizer, FULL)[1]["state"], expected[1])


@ORIG_PARAMS
@on_ranks(2)
def test_a_rank_for_which_a_codec_returns_no_values_has_no_such_names(use_orig_params: bool, rank: int) -> None:
    (model, optimizer), _ = two_trained(use_orig_params)
    expected, rows = whole_state(model), save(model, optimizer, FULL)[1]["state"]
    with registered(ELSEWHERE) as elsewhere, FSDP.state_dict_type(model, elsewhere):
        state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]
    kept = {name: value for name, value in expected.items() if rank == 0 or name.endswith("shift")}
    assert_equal(dict(state), kept)
    assert_equal(states, rows if rank == 0 else {name: {"step": row["step"]} for name, row in rows.items()})


@on_ranks(2)
def test_a_value_that_the_toy_codec_refuses_is_an_error_of_the_load() -> None:
    model = shard(seeded(), use_orig_params=True)
    with registered(NEGATED) as negated, FSDP.state_dict_type(model, negated):
        state = model.state_dict()
        state["first.weight"] = Negated(torch.zeros(1), 10_000, state["first.weight"].shape)
        with pytest.raises(RuntimeError, match=r"first\.weight: elements of another rank"):
            model.load_state_dict(state)


def rounded(tensors: dict[str, torch.Tensor], exact: str) -> dict[str, torch.Tensor]:
    """Return tensors rounded to bfloat16, except those whose names end in ``exact``, which no codec encodes."""
    return {name: value if name.endswith(exact) else value.bfloat16().float() for name, value in tensors.items()}


@ORIG_PARAMS
@pytest.mark.parametrize("summoned", [False, True])
@on_ranks(2)
def test_a_toy_type_of_full_tensors_stores_them_in_its_own_form(
    summoned: bool, use_orig_params: bool, rank: int
) -> None:
    (model, optimizer), (other, other_optimizer) = two_trained(use_orig_params)
    expected = whole_state(model), save(model, optimizer, FULL)[1]["state"]
    with registered(HALF) as half:
        options = HalfConfig(rank0_only=True), HalfOptimConfig(rank0_only=True)
        with FSDP.state_dict_type(model, half, *options):
            with FSDP.summon_full_params(model) if summoned else nullcontext():
                state = model.state_dict()
            states = FSDP.optim_state_dict(model, optimizer)
        if rank:
            assert (dict(state), states) == ({}, {})
        tensors = [value for name, value in state.items() if not name.endswith("shift")]
        tensors += [row["exp_avg"] for row in states.get("state", {}).values()]
        assert all(type(value) is torch.Tensor and value.dtype is torch.bfloat16 for value in tensors)
        given = [dict(state)]
        dist.broadcast_object_list(given, src=0)
        with FSDP.state_dict_type(other, half, *options):
            other.load_state_dict(given[0])
            other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, states))
    assert_equal(whole_state(other), rounded(expected[0], "shift"))
    loaded = {name: rounded(row, "step") for name, row in expected[1].items()}
    assert_equal(save(other, other_optimizer, FULL)[1]["state"], loaded)
