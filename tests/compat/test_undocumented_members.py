"""FSDP1's undocumented names are added to the wrapper class, which inherits from no class of compat."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.compat.semi_private import add_undocumented_members
from tests.support import on_ranks


def test_the_wrapper_inherits_from_no_class_of_compat() -> None:
    assert [kind for kind in FSDP.__mro__ if kind.__module__.startswith("fsdp_flat.compat")] == []


def test_a_members_own_definition_in_the_wrapper_stays_and_one_that_its_base_defines_is_replaced() -> None:
    class Base(nn.Module):
        world_size = "of the base"

    class Wrapper(Base):
        """Defines one of the names itself."""

        rank = "its own"

    add_undocumented_members(Wrapper)
    assert Wrapper.rank == "its own"
    assert isinstance(Wrapper.world_size, property)
    assert (Wrapper.__doc__, Wrapper.__qualname__.rpartition(".")[2]) == ("Defines one of the names itself.", "Wrapper")


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
