"""FSDP1's undocumented names are added to the wrapper class: a subclass overrides them and calls the wrapper's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.support import on_ranks


class Named(FSDP):
    """Overrides undocumented members, as subclasses of FSDP1's wrapper do."""

    @property
    def _is_root(self) -> Any:
        return "root", super()._is_root  # type: ignore[misc]

    def _assert_state(self, state: Any) -> None:
        self.asserted = state
        super()._assert_state(state)  # type: ignore[misc]


@on_ranks(2)
def test_a_subclass_overrides_undocumented_members_and_calls_the_wrappers() -> None:
    model = Named(nn.Linear(2, 2))
    assert model._is_root == ("root", None)
    model.check_is_root()
    assert model._is_root == ("root", True)
    model._assert_state(model.training_state)
    assert model.asserted is model.training_state
    with pytest.raises(ValueError, match="was expected to be in"):
        model._assert_state([])
