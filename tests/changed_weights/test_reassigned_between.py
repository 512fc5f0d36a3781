"""Parameters that a program assigns: before the first forward, by a load, between a forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_flat import fully_shard
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.peer import peer_fully_shard

X = torch.ones(2, 4)


def layers(shard: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)


def filled_like(param: Any, value: float) -> DTensor:
    return distribute_tensor(torch.full(param.shape, value), param.device_mesh, param.placements)


@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("num_writes", range(6))
@on_ranks(2)
def test_a_reassigned_weight_is_found_after_any_number_of_writes(num_writes: int, reshards: bool) -> None:
    """Each tensor has a version counter of its own, so a sum of these can fall back to an earlier value."""
    model = layers(fully_shard, reshard_after_forward=reshards)
    param = model[0].weight
    with torch.no_grad():
        for _ in range(num_writes):
            param._local_tensor.mul_(2)
    loss = model(X).sum()
    model.reshard()
    model[0].weight = nn.Parameter(filled_like(param, 0.0))
    with pytest.raises(UsageError, match=r"'0\.weight' of unit 'Sequential' was assigned .* after .*distribute_tensor"):
        loss.backward()


@pytest.mark.parametrize("way", ["assigned", "loaded"])
@pytest.mark.parametrize("forwards", [0, 1])
@on_ranks(2)
def test_what_torch_takes_is_taken_and_an_assignment_that_it_would_ignore_is_an_error(forwards: int, way: str) -> None:
    outputs = []
    for shard in (fully_shard, peer_fully_shard):
        model = layers(shard)
        for _ in range(forwards):
            model(X).sum().backward()
        value = filled_like(model[0].weight, 2.0)
        if way == "loaded":
            model.load_state_dict({"0.weight": value}, strict=False, assign=True)
        else:
            model[0].weight = nn.Parameter(value)
            if forwards:
                break
        outputs.append(model(X))
    if outputs:
        torch.testing.assert_close(outputs[0], outputs[1])
        return
    assert shard is fully_shard
    for use in (lambda: model(X), model.state_dict):
        with pytest.raises(UsageError, match=r"'0\.weight' .*assigned on rank .*distribute_tensor.* load a state dict"):
            use()


@on_ranks(2)
def test_copied_values_train_after_an_assignment_was_refused() -> None:
    model = layers(fully_shard)
    param = model[0].weight
    model(X).sum().backward()
    model[0].weight = nn.Parameter(filled_like(param, 2.0))
    with pytest.raises(UsageError, match="distribute_tensor"):
        model(X)
    model[0].weight = param
    with torch.no_grad():
        param.copy_(filled_like(param, 2.0))
    plain = layers(lambda module: module)
    with torch.no_grad():
        plain[0].weight.fill_(2.0)
    torch.testing.assert_close(model(X), plain(X))


@on_ranks(2)
def test_another_local_tensor_after_the_first_forward_is_an_error() -> None:
    model = layers(fully_shard)
    model(X).sum().backward()
    model[1].to_empty(device="cpu")
    with pytest.raises(UsageError, match=r"'1\.weight' of unit 'Sequential' .*conversion of a module inside the unit"):
        model(X)
