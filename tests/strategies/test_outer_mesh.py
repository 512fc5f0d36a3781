"""Modules whose first parameters are on another mesh than that of the call: the outer unit is on that of the call."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.composable import fully_shard
from fsdp_flat.core import units_of
from fsdp_flat.errors import PeerFailureError
from tests.strategies.test_several_meshes import inputs
from tests.support import on_ranks
from tests.support.beside import grads_of
from tests.support.experts import Meshes, needs_mesh_infos
from tests.support.kit import seeded, square_loss
from tests.support.models import Block, Moe, MoeBlock
from tests.support.patience import impatient


class ExpertsFirst(MoeBlock):
    """A block whose first parameters are those of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["norm"], self._modules["gate"] = self._modules.pop("norm"), self._modules.pop("gate")


class AllApart(nn.Module):
    """Experts, and dense layers in a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        block = MoeBlock()
        self.experts, self.dense = block.experts, nn.ModuleDict({"norm": block.norm, "gate": block.gate})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.dense["gate"](self.dense["norm"](x)).view(self.experts.num_experts, -1, x.shape[-1])
        return x + self.experts(tokens).reshape(x.shape)


def shard(model: Any, meshes: Meshes) -> Any:
    """Shard a model with experts in one call, its dense layers before if they are apart."""
    model.experts.split(meshes.parallel)
    own, info = set(model.experts.parameters()), meshes.info
    for layer in model.dense.values() if isinstance(model, AllApart) else ():
        fully_shard(layer, mesh=meshes.dense)

    def place(param: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), info) if param in own else None

    return fully_shard(model, mesh=meshes.dense, shard_placement_fn=place)


def adam(model: nn.Module, step: int | None = None) -> torch.optim.Optimizer:
    """Return an optimizer, after a step if there is one."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if step is not None:
        square_loss(model, inputs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def locals_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return this rank's part of every state."""
    return [
        {name: value.to_local() if isinstance(value, DTensor) else value for name, value in states.items()}
        for group in optimizer.param_groups
        for param in group["params"]
        if (states := optimizer.state.get(param))
    ]


@contextmanager
def in_a_hurry() -> Iterator[None]:
    """Exchange tensors by gloo inside the block, and look soon whether a rank that is waited for has failed."""
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = "0"
    # One in which no rank waits for another that has failed.
    group = dist.new_group()
    with impatient():
        yield
    dist.barrier(group)


def meshes_of_new_groups() -> Meshes:
    """Create meshes of which none has the default group, which later tests use, and which a failed wait breaks."""
    meshes = Meshes.of(4, 2)
    meshes.dense = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("fsdp",))
    return meshes


MODELS = pytest.mark.parametrize("kind", [ExpertsFirst, AllApart])


@needs_mesh_infos
@on_ranks(4)
@MODELS
def test_the_outer_unit_is_on_the_mesh_of_the_call(kind: type[nn.Module]) -> None:
    meshes, plain = Meshes.of(4, 2), seeded(kind)
    model = shard(copy.deepcopy(plain), meshes)
    (unit,) = units_of(model, recurse=False)
    assert [unit.name + options.mesh_suffix for options, _ in unit.by_mesh()] == [
        kind.__name__,
        f"{kind.__name__} (efsdp)",
    ]
    assert [options.groups.num_ranks for options, _ in unit.by_mesh()] == [4, 2]
    model.set_gradient_divide_factor(4)
    for _ in range(2):
        for each in (plain, model):
            square_loss(each, inputs(0)).backward()
    for param in plain.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= 4
    torch.testing.assert_close(grads_of(model), grads_of(plain))


@needs_mesh_infos
@on_ranks(4)
def test_hooks_of_a_module_with_parameters_on_another_mesh_alone_are_for_that() -> None:
    model, seen = shard(seeded(AllApart), Meshes.of(4, 2)), list[torch.Tensor]()
    model.set_all_reduce_hook(seen.append)
    square_loss(model, inputs(0)).backward()
    assert len(seen) == 1


@needs_mesh_infos
@on_ranks(4)
@MODELS
@pytest.mark.filterwarnings("ignore:.*full_optim_state_dict is an older form")
def test_optimizer_states_of_rank_zero_reach_every_rank(kind: type[nn.Module], rank: int) -> None:
    model = shard(seeded(kind), Meshes.of(4, 2))
    optimizer = adam(model, 0)
    saved = FSDP.full_optim_state_dict(model, optimizer)
    other = adam(model)
    other.load_state_dict(FSDP.scatter_full_optim_state_dict(saved if rank == 0 else None, model, optim=other))
    torch.testing.assert_close(locals_of(other), locals_of(optimizer), rtol=0, atol=0)


@needs_mesh_infos
@on_ranks(4)
@pytest.mark.parametrize("place", ["second mesh", "smaller group", "separate group"])
@in_a_hurry()
def test_ranks_that_wait_in_any_group_learn_why_others_have_failed(place: str, rank: int) -> None:
    meshes, model = meshes_of_new_groups(), seeded(Moe)
    if place == "second mesh":
        model = meshes.shard(model, fully_shard)
        # The all-gather of the block's first mesh has begun then, that of its experts has not.
        failing: Any = units_of(model.blocks[0])[0].param_groups[-1].comm.step_collectives
        name = "begin_all_gather"
    else:
        for block in model.blocks:
            fully_shard(block, mesh=meshes.dense, reshard_after_forward=2 if place == "smaller group" else False)
        fully_shard(model, mesh=meshes.dense)
        failing, name = model.head, "forward"
        if place == "separate group":
            for block in model.blocks:
                block.set_separate_reduce_scatter_group()
    square_loss(model, inputs(0)).backward()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    # Of each smaller group of two ranks one fails, or else both that exchange tokens.
    fails = rank % 2 == 0 if place == "smaller group" else rank < 2
    if fails:
        setattr(failing, name, fail)
    with pytest.raises(ZeroDivisionError if fails else PeerFailureError, match="on purpose"):
        square_loss(model, inputs(1)).backward()


@on_ranks(4)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.filterwarnings("ignore:.*full_optim_state_dict is an older form")
def test_optimizer_states_of_rank_zero_reach_units_of_all_strategies(
    use_orig_params: bool, outer: bool, rank: int
) -> None:
    # The outermost unit, with the groups of all ranks, has parameters or none.
    plane = init_device_mesh("cpu", (2, 2))
    block = FSDP(Block(), device_mesh=plane, use_orig_params=use_orig_params)
    assert block.sharding_strategy is ShardingStrategy.HYBRID_SHARD
    small = FSDP(Block(), process_group=dist.group.WORLD, use_orig_params=use_orig_params)
    last = nn.Linear(8, 8) if outer else nn.Identity()
    model = FSDP(nn.Sequential(block, small, last), use_orig_params=use_orig_params)
    optimizer = adam(model, 0)
    saved = FSDP.full_optim_state_dict(model, optimizer)
    other = adam(model)
    other.load_state_dict(FSDP.scatter_full_optim_state_dict(saved if rank == 0 else None, model, optim=other))
    torch.testing.assert_close(locals_of(other), locals_of(optimizer), rtol=0, atol=0)
