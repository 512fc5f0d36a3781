"""Pain 1: weights shared by two modules that an auto-wrap policy puts into two units."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.core import units_of
from fsdp_flat.errors import TiedParameterError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside
from tests.support.kit import wrapped
from tests.support.models import Block


class Language(nn.Module):
    """Embedding and head share their weight, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = Block()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def tokens_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tokens = (x.abs() * 4).long() % 11
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(1))


UNITS = (nn.Embedding, nn.Linear, Block)


@on_ranks(2)
@WRAPPER_FRONTS
def test_a_tie_across_units_survives_training_under_auto_wrap(front: str) -> None:
    beside = Beside(Language(), front, units=UNITS)
    names = {unit.name for unit in units_of(beside.ours) if unit.param_groups} | {""}
    beside.train(tokens_loss, num_steps=3)
    with FSDP.summon_full_params(beside.ours, writeback=False):
        assert beside.ours.embedding.weight is beside.ours.head.weight
    assert any("block" in name for name in names), "the policy made units at all"


@on_ranks(2)
@WRAPPER_FRONTS
def test_a_state_dict_of_tied_weights_loads_strictly_into_a_plain_model(front: str) -> None:
    beside = Beside(Language(), front, units=UNITS)
    beside.train(tokens_loss)
    state = beside.ours.state_dict()
    assert list(state) == list(beside.plain.state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr(), "one copy and its alias"
    plain = Language().double()
    plain.load_state_dict(state, strict=True)
    assert plain.head.weight is plain.embedding.weight
    assert_equal(dict(plain.state_dict()), dict(state))


@on_ranks(2)
def test_the_tied_weight_moves_up_to_the_innermost_common_unit() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = Language()
            self.extra = nn.Linear(11, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.extra(self.language(tokens))

    model = wrapped(Outer(), auto_wrap_policy=ModuleWrapPolicy({nn.Embedding, nn.Linear, Language}))
    held = {
        (type(unit.module).__name__, site.fqn)
        for unit in units_of(model)
        for handle in unit.param_groups
        for entry in handle.params
        for site in entry.sites
    }
    assert ("Language", "embedding.weight") in held
    assert ("Language", "head.weight") in held
    assert not any(kind in ("Outer", "Embedding") for kind, _ in held)


@on_ranks(2)
@WRAPPER_FRONTS
def test_wrapping_tied_modules_by_hand_raises_with_both_names_and_both_units(front: str) -> None:
    model = Language()
    model.embedding = wrapped(model.embedding, use_orig_params=front == "originals")
    with pytest.raises(TiedParameterError) as caught:
        wrapped(model, use_orig_params=front == "originals")
    text = str(caught.value)
    assert re.search(r"'head.weight' .*of unit 'Language'", text)
    assert re.search(r"'weight' \(.*\) of unit 'Embedding'", text)
    assert "auto_wrap_policy" in text
