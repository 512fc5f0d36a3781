"""A memory budget counts what parameters with all-gather extensions take once they are unsharded."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_flat.composable import fully_shard
from fsdp_flat.core import units_of
from tests.support import on_ranks
from tests.support.extended_tensors import Holder, Pair, SentInBfloat16
from tests.support.kit import batch
from tests.tensor_classes.test_all_gather_extensions import model_of, sharded, trained


def held_after_forward(model: nn.Module, rank: int) -> list[int]:
    """Return the bytes of unsharded parameters of each unit but the outermost between forward and backward."""
    loss = model(batch(rank)).pow(2).mean()
    held = [sum(group.output.nbytes for group in unit.param_groups) for unit in units_of(model)[1:]]
    loss.backward()
    return held


@pytest.mark.parametrize("kind", [Pair, SentInBfloat16])
@on_ranks(2)
def test_units_with_all_gather_extensions_stay_within_the_budget(kind: type[Holder], rank: int) -> None:
    plain = sharded(model_of(kind), fully_shard)
    expected = trained(plain)
    nbytes = units_of(plain)[1].buffer_nbytes
    assert nbytes > 0
    for num_units in (1, 2):
        model = sharded(model_of(kind), fully_shard, reshard_after_forward=f"{int((num_units + 0.5) * nbytes)}B")
        assert trained(model) == expected
        assert held_after_forward(model, rank) == [0] * (3 - num_units) + [nbytes] * num_units
