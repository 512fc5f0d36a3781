"""A state dict loaded as another type than it was saved: the error says which type it is and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
# Saved as, loaded as, what the error says.
WRONG = [
    (LOCAL, FULL, r"0\._flat_param: an entry of a LOCAL_STATE_DICT.*'0\.weight' the first"),
    (LOCAL, SHARDED, r"0\._flat_param: an entry of a LOCAL_STATE_DICT.*unit '0'.*'0\.weight' the first"),
    (FULL, LOCAL, r"0\._flat_param: this load is of a LOCAL_STATE_DICT.*unit '0'.*FULL_STATE_DICT or a SHARDED"),
    (SHARDED, LOCAL, r"1\._flat_param: this load is of a LOCAL_STATE_DICT.*unit '1'.*FULL_STATE_DICT or a SHARDED"),
    (SHARDED, FULL, r"4 entries of the state dict are sharded tensors, '0\.weight' the first.*SHARDED_STATE_DICT\)"),
]


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_a_state_dict_of_another_type_is_refused_by_its_type_and_nothing_is_written(use_orig_params: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    for saved_as, loaded_as, text in WRONG:
        with FSDP.state_dict_type(model, saved_as):
            state = model.state_dict()
        if saved_as is FULL:
            state = {name: value + 1 for name, value in state.items()}
        before = [param.detach().clone() for param in model.parameters()]
        with FSDP.state_dict_type(model, loaded_as), pytest.raises(RuntimeError, match=rf"(?s){text}") as caught:
            model.load_state_dict(state)
        assert "Missing key" not in str(caught.value)
        assert "Unexpected key" not in str(caught.value)
        assert_equal([param.detach().clone() for param in model.parameters()], before)
    # Whole tensors are taken as sharded ones.
    full = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(full)
    assert_equal(dict(model.state_dict()), full)
