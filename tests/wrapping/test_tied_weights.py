"""Pain 1: weights shared by two modules that an auto-wrap policy puts into two units."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.core import units_of
from fsdp_flat.errors import TiedParameterError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.kit import Block, wrapped
from tests.support.steps import Twin


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


POLICY = ModuleWrapPolicy({nn.Embedding, nn.Linear, Block})


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_tie_across_units_survives_training_under_auto_wrap(use_orig_params: bool) -> None:
    twin = Twin.of(Language(), auto_wrap_policy=POLICY, use_orig_params=use_orig_params)
    names = {unit.name for unit in units_of(twin.model) if unit.param_groups} | {""}
    for _ in range(3):
        twin.step(tokens_loss)
    with FSDP.summon_full_params(twin.model, writeback=False):
        assert twin.model.embedding.weight is twin.model.head.weight
    assert any("block" in name for name in names), "the policy made units at all"


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_state_dict_of_tied_weights_loads_strictly_into_a_plain_model(use_orig_params: bool) -> None:
    twin = Twin.of(Language(), auto_wrap_policy=POLICY, use_orig_params=use_orig_params)
    twin.step(tokens_loss)
    state = twin.model.state_dict()
    assert list(state) == list(twin.plain.state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr(), "one copy and its alias"
    plain = Language()
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
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrapping_tied_modules_by_hand_raises_with_both_names_and_both_units(use_orig_params: bool) -> None:
    model = Language()
    model.embedding = wrapped(model.embedding, use_orig_params=use_orig_params)
    with pytest.raises(TiedParameterError) as caught:
        wrapped(model, use_orig_params=use_orig_params)
    text = str(caught.value)
    assert re.search(r"'head.weight' .*of unit 'Language'", text)
    assert re.search(r"'weight' \(.*\) of unit 'Embedding'", text)
    assert "auto_wrap_policy" in text


@on_ranks(2)
def test_a_tie_inside_one_unit_is_one_slot_with_two_places() -> None:
    twin = Twin.of(Language(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    root = twin.model._unit
    assert [param_info.fqn for param_info in root.param_groups[0].layout.param_infos] == ["embedding.weight"]
    twin.step(tokens_loss)


@on_ranks(2)
def test_a_deepcopied_plain_model_that_is_tied_trains_the_same_as_the_sharded_one_after_a_load() -> None:
    trained = Twin.of(Language(), auto_wrap_policy=POLICY)
    trained.step(tokens_loss)
    state: dict[str, Any] = trained.model.state_dict()
    torch.manual_seed(99)
    fresh = Language()
    fresh_copy = copy.deepcopy(fresh)
    again = Twin.of(fresh, auto_wrap_policy=POLICY)
    again.model.load_state_dict(state)
    fresh_copy.load_state_dict(state)
    again.plain.load_state_dict(state)
    again.step(tokens_loss)
    assert dist.get_world_size() == 2
