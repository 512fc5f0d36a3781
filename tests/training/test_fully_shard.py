"""Trains with fully_shard beside a plain replica and torch's fully_shard."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import FSDPModule
from tests.support import on_ranks
from tests.support.beside import BOTH, Beside, adamw
from tests.support.models import Stack


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_training_equals_a_replica_and_torch(reshard_after_forward: bool | None) -> None:
    beside = Beside(Stack(), BOTH, optimizer=adamw, reshard_after_forward=reshard_after_forward)
    assert isinstance(beside.ours, FSDPModule)
    assert type(beside.ours).__name__ == "FSDPStack"
    beside.train(num_steps=3)
    for (name, value), other in zip(beside.ours.named_parameters(), beside.theirs.parameters(), strict=True):
        assert isinstance(value, DTensor), name
        assert value.placements == other.placements
        assert value.to_local().shape == other.to_local().shape
