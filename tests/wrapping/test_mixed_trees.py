"""Units of the wrapper class inside modules of fully_shard, and the reverse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.composable import fully_shard, trace
from tests.support import assert_close, on_ranks
from tests.support.beside import assert_idle, average_gradients, batch_of
from tests.support.kit import square_loss
from tests.support.models import Stack


def wrapper(module: nn.Module, *, use_orig_params: bool = True) -> FSDP:
    return FSDP(module, use_orig_params=use_orig_params)


def mixed(model: Any, tree: str) -> Any:
    """Shard the blocks and the root by the fronts that ``tree`` names."""
    blocks = model.blocks
    if tree == "wrappers in fully_shard":
        for index in range(3):
            blocks[index] = wrapper(blocks[index])
        return fully_shard(model)
    if tree == "fully_shard in a wrapper":
        for index in range(3):
            fully_shard(blocks[index])
        return wrapper(model)
    if tree == "both in fully_shard":
        fully_shard(blocks[0])
        blocks[1] = wrapper(blocks[1])
        fully_shard(blocks[2], reshard_after_forward=False)
        return fully_shard(model)
    if tree == "both in a wrapper":
        blocks[0] = wrapper(blocks[0])
        fully_shard([blocks[1], blocks[2]])
        return wrapper(model)
    assert tree == "three levels"
    fully_shard(blocks[0].up)
    blocks[0] = wrapper(blocks[0])
    blocks[1].up = wrapper(blocks[1].up)
    fully_shard(blocks[1])
    return fully_shard(model)


TREES = [
    "wrappers in fully_shard",
    "fully_shard in a wrapper",
    "both in fully_shard",
    "both in a wrapper",
    "three levels",
]


def losses_of(model: nn.Module, *, num_steps: int = 4, averages: bool = False, way: str = "plain") -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(num_steps):
        for number in range(2):
            loss = square_loss(model, batch_of(2 * step + number))
            if way == "no sync" and not averages:
                for module in model.modules():
                    if hasattr(module, "set_requires_gradient_sync"):
                        module.set_requires_gradient_sync(number == 1)
            loss.backward()
        if averages:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2, 4)
@pytest.mark.parametrize("tree", TREES)
def test_a_tree_of_both_fronts_trains_as_a_replica(tree: str) -> None:
    plain = Stack().double()
    model = mixed(copy.deepcopy(plain), tree)
    expected = losses_of(plain, averages=True)
    assert_close(torch.tensor(losses_of(model)), torch.tensor(expected), atol=1e-6, rtol=1e-4)
    assert_idle(model)


@on_ranks(2)
@pytest.mark.parametrize("tree", TREES)
def test_the_switches_of_a_unit_serve_units_of_the_other_front(tree: str) -> None:
    plain = Stack().double()
    model = mixed(copy.deepcopy(plain), tree)
    units = [module for module in model.modules() if hasattr(module, "set_modules_to_forward_prefetch")]
    model.set_modules_to_forward_prefetch(units[1:])
    units[-1].set_modules_to_backward_prefetch(units[1:-1])
    model.set_reshard_after_backward(False)
    model.set_backend_collectives()
    losses = losses_of(model, num_steps=3)
    model.set_reshard_after_backward(True)
    expected = losses_of(plain, num_steps=3, averages=True)
    assert_close(torch.tensor(losses), torch.tensor(expected), atol=1e-6, rtol=1e-4)
    with trace(model) as events:
        square_loss(model, batch_of(0)).backward()
    unsharded = [name for event, name in events if event == "wait_for_unshard"]
    assert set(unsharded) == {name for event, name in events if event == "reduce_scatter"}
