"""A parameter that is reassigned between a forward and its backward: always an error, whatever was written before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fsdp_flat import fully_shard
from fsdp_flat.errors import PhaseError
from tests.support import on_ranks


@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("num_writes", range(6))
@on_ranks(2)
def test_a_reassigned_weight_is_found_after_any_number_of_writes(num_writes: int, reshards: bool) -> None:
    """Each tensor has a version counter of its own, so a sum of these can fall back to an earlier value."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), reshard_after_forward=reshards)
    param = model[0].weight
    with torch.no_grad():
        for _ in range(num_writes):
            param._local_tensor.mul_(2)  # type: ignore[attr-defined]
    loss = model(torch.ones(2, 4)).sum()
    model.reshard()
    other = distribute_tensor(torch.zeros(4, 4), param.device_mesh, param.placements)  # type: ignore[attr-defined]
    model[0].weight = nn.Parameter(other)
    with pytest.raises(PhaseError, match="changed after the forward"):
        loss.backward()
