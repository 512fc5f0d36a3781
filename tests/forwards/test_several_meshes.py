"""Forwards of units on several meshes that are not those of a nested module: methods of the root, lists of modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from fsdp_flat.composable import fully_shard, register_fsdp_forward_method
from fsdp_flat.core import step_of
from fsdp_flat.core.unit import own_unit
from tests.strategies.test_several_meshes import inputs
from tests.support import on_ranks
from tests.support.beside import assert_idle, average_gradients, grads_of
from tests.support.experts import Meshes, needs_mesh_infos
from tests.support.kit import seeded, square_loss
from tests.support.models import Moe, MoeBlock

pytestmark = needs_mesh_infos


class Scored(Moe):
    """A model with a method that computes without gradients."""

    @torch.no_grad()
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


@on_ranks(4)
def test_a_method_of_the_root_without_gradients_leaves_nothing_to_wait_for() -> None:
    meshes, plain = Meshes.of(4, 2), seeded(Scored)
    model: Any = copy.deepcopy(plain)
    place, info = meshes.split(model), meshes.info
    apart = {*model.head.parameters()}
    for block in model.blocks:
        fully_shard(block, mesh=meshes.dense, shard_placement_fn=place)

    def of_root(param: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), info) if param in apart else None

    fully_shard(model, mesh=meshes.dense, shard_placement_fn=of_root)
    register_fsdp_forward_method(model, "score")
    assert len(own_unit(model).by_mesh()) == 2
    for step in range(3):
        torch.testing.assert_close(model.score(inputs(step)), plain.score(inputs(step)))
    step = step_of(model, own_unit(model))
    assert not step.order.pending._iterations
    # A method with gradients is waited for.
    loss = square_loss(model, inputs(3))
    assert len(step.order.pending._iterations) == 1
    loss.backward()
    assert not step.order.pending._iterations
    assert_idle(model)


class Encoder(nn.Sequential):
    """A part of a model, with a method that computes without gradients."""

    @torch.no_grad()
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_a_method_of_a_nested_unit_without_gradients_leaves_nothing_to_wait_for(has_run: bool) -> None:
    model: Any = nn.Sequential(Encoder(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6))
    plain: Any = copy.deepcopy(model)
    for module in (model[0][0], model[0], model):
        fully_shard(module)
    register_fsdp_forward_method(model[0], "score")
    x = torch.randn(3, 6)
    if has_run:
        model(x).sum().backward()
    for _ in range(3):
        torch.testing.assert_close(model[0].score(x), plain[0].score(x))
    step = step_of(model, own_unit(model[0]))
    assert not step.order.pending._iterations
    if has_run:  # an outermost unit is not resharded after its forward
        assert_idle(model)


@on_ranks(4)
@pytest.mark.parametrize("reshards", [None, True, False])
def test_modules_of_a_list_that_are_called_by_themselves_reshard_on_all_meshes(reshards: bool | None) -> None:
    meshes = Meshes.of(4, 1)
    plain = seeded(lambda: nn.ModuleList([MoeBlock(), MoeBlock()]))
    blocks = list(copy.deepcopy(plain))
    own, info = {param for block in blocks for param in block.experts.parameters()}, meshes.info

    def place(param: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), info) if param in own else None

    fully_shard(blocks, mesh=meshes.dense, shard_placement_fn=place, reshard_after_forward=reshards)
    unit = own_unit(blocks[0])
    assert [len(handles) for _, handles in unit.by_mesh()] == [1, 1]
    with torch.no_grad():
        torch.testing.assert_close(blocks[0](inputs(0)), plain[0](inputs(0)))
    for modules in (plain, blocks):
        output = modules[1](modules[0](inputs(0)))
        output.sum().backward()
    assert not unit.step.order.unfinished_forwards
    assert unit.is_sharded
    average_gradients(plain)
    for block, other in zip(blocks, plain, strict=True):
        torch.testing.assert_close(grads_of(block), grads_of(other))
