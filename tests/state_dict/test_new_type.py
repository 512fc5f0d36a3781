"""A new state-dict type is an enum member, a codec and a table row, and saves models and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType
from fsdp_flat.api import OptimStateDictConfig, StateDictConfig
from fsdp_flat.errors import LoadError
from fsdp_flat.state import CodecRow, LoadPlan, StateDictCodec, StateShard, codecs
from tests.state_dict.kit import FULL, OPTIMIZERS, TASKS, save, train
from tests.support import assert_equal, on_ranks
from tests.wrapper.models import seeded, shard, whole_state

KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


@dataclass(frozen=True)
class Negated:
    """The value of the toy type: this rank's elements with the sign changed, and their place in the tensor."""

    elements: torch.Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype


@dataclass
class NegatedConfig(StateDictConfig):
    """Options for models."""


@dataclass
class NegatedOptimConfig(OptimStateDictConfig):
    """Options for optimizers."""


class NegatedCodec(StateDictCodec):
    """Encodes each rank's own elements, so that nothing is communicated."""

    communicates = False

    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        return [Negated(-shard.local, shard.run.start, shard.full_shape) for shard in shards]

    def reads(self, value: Any) -> bool:
        return isinstance(value, Negated)

    def decode(self, value: Any, target: StateShard, plan: LoadPlan) -> None:
        if (value.start, value.elements.shape) != (target.run.start, target.local.shape):
            raise LoadError(f"{target.label}: elements of another rank.")
        plan.copy(target.local, -value.elements)


@contextmanager
def registered() -> Iterator[StateDictType]:
    """Add the enum member and the table row inside the block."""
    member = object.__new__(StateDictType)
    member._name_, member._value_ = "NEGATED_STATE_DICT", 99
    row = CodecRow(NegatedCodec(), NegatedCodec(), NegatedConfig, NegatedOptimConfig)
    members: dict[str, Any] = StateDictType._member_map_  # type: ignore[assignment]
    with (
        mock.patch.dict(members, {member.name: member}),
        mock.patch.object(codecs, "CODECS", MappingProxyType({**codecs.CODECS, member: row})),
    ):
        yield member


@KINDS
@on_ranks(2)
def test_a_toy_type_saves_and_loads_a_model_and_adam(use_orig_params: bool) -> None:
    made = []
    for seed in range(2):
        model = shard(seeded(seed=seed), use_orig_params=use_orig_params)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        train(model, optimizer, TASKS["uneven"], range(1 + seed))
        made.append((model, optimizer))
    (model, optimizer), (other, other_optimizer) = made
    expected = whole_state(model), save(model, optimizer, FULL)[1]["state"]
    with registered() as negated:
        with FSDP.state_dict_type(model, negated):
            state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        assert isinstance(state["first.weight"], Negated)
        assert all(isinstance(row["exp_avg"], Negated) for row in states["state"].values())
        with FSDP.state_dict_type(other, negated):
            other.load_state_dict(state)
            other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, states))
    assert_equal(whole_state(other), expected[0])
    assert_equal(save(other, other_optimizer, FULL)[1]["state"], expected[1])


@on_ranks(2)
def test_a_value_that_the_toy_codec_refuses_is_an_error_of_the_load() -> None:
    model = shard(seeded(), use_orig_params=True)
    with registered() as negated, FSDP.state_dict_type(model, negated):
        state = model.state_dict()
        state["first.weight"] = Negated(torch.zeros(1), 10_000, state["first.weight"].shape)
        with pytest.raises(RuntimeError, match=r"first\.weight: elements of another rank"):
            model.load_state_dict(state)
