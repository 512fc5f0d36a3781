"""Parameters whose gradients nothing averages over ranks are named at the end of the first backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.composable import fully_shard
from tests.support import on_ranks
from tests.support.kit import wrapped


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def _rows(net: Net, *, root: bool = False) -> Any:
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net) if root else net


def _wrappers(net: Net, *, root: bool = False) -> Any:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = wrapped(block)
    return wrapped(net) if root else net


FRONTS = pytest.mark.parametrize("shard", [_rows, _wrappers], ids=["fully_shard", "wrapper"])


def _steps(model: nn.Module, rank: int, *, params: Any = None, num_steps: int = 2) -> list[str]:
    """Train, and return the warnings about gradients."""
    optim = torch.optim.SGD(model.parameters() if params is None else params, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(num_steps):
            torch.manual_seed(10 * step + rank)
            model(torch.randint(0, 10, (4,))).sum().backward()
            optim.step()
            optim.zero_grad()
    return [str(each.message) for each in caught if "Gradients of" in str(each.message)]


@pytest.mark.of_guards
@FRONTS
@on_ranks(2)
def test_parameters_outside_of_sharded_blocks_are_named_once_at_the_first_backward(
    shard: Callable[..., Any], rank: int
) -> None:
    """The sibling is the wrapper around blocks and not around the model."""
    model = shard(Net())
    (told,) = _steps(model, rank)
    assert "Gradients of 3 parameters of Net are each rank's own" in told
    assert "'embedding.weight', 'head.weight', 'head.bias'" in told
    assert ("Call fully_shard on the Net too" if shard is _rows else "Call FullyShardedDataParallel on") in told
    assert "blocks" not in told
    described = fsdp_flat.describe(model)
    assert described.unsynchronized == ("embedding.weight", "head.weight", "head.bias")
    assert "in no unit, with gradients of each rank's own: 'embedding.weight'" in str(described)
    assert fsdp_flat.check_replicas(model) == ["embedding.weight", "head.weight"]


@FRONTS
@on_ranks(2)
def test_nothing_is_said_of_a_model_that_is_sharded_as_a_whole(shard: Callable[..., Any], rank: int) -> None:
    model = shard(Net(), root=True)
    assert _steps(model, rank) == []
    assert fsdp_flat.describe(model).unsynchronized == ()
    assert "in no unit" not in str(fsdp_flat.describe(model))
    holder = nn.ModuleDict({"net": shard(Net(), root=True)})  # a plain module around it, without parameters
    list(holder.parameters())
    assert _steps(holder["net"], rank, params=holder.parameters()) == []


@FRONTS
@on_ranks(2)
def test_nothing_is_said_of_parameters_that_a_caller_reduces_or_freezes_or_does_not_use(
    shard: Callable[..., Any], rank: int
) -> None:
    model = shard(Net())

    def reduce(param: nn.Parameter) -> None:
        dist.all_reduce(param.grad)

    model.embedding.weight.register_post_accumulate_grad_hook(reduce)
    model.head.weight.requires_grad_(False)
    model.head.bias.register_hook(lambda grad: grad)
    model.unused = nn.Linear(2, 2)
    assert _steps(model, rank) == []


@on_ranks(2)
def test_nothing_is_said_of_parts_in_ddp(rank: int) -> None:
    model = _rows(Net())
    model.embedding, model.head = DistributedDataParallel(model.embedding), DistributedDataParallel(model.head)
    assert _steps(model, rank) == []


@on_ranks(2)
def test_nothing_is_said_of_replicated_parts(rank: int) -> None:
    model = _rows(Net())
    replicate(model.embedding)
    replicate(model.head)
    assert _steps(model, rank) == []
    assert fsdp_flat.describe(model).unsynchronized == ()


@pytest.mark.of_guards
@on_ranks(2)
def test_ignored_parameters_outside_of_units_are_not_named(rank: int) -> None:
    net = Net()
    for block in net.blocks:
        fully_shard(block, ignored_params=set(block.parameters()) if block is net.blocks[0] else None)
    (told,) = _steps(net, rank)
    assert "'blocks.0.weight'" not in told


@pytest.mark.of_guards
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize("shape", [(1, 2), (1, 1, 2)], ids=str)
@on_ranks(2)
def test_a_mesh_that_connects_no_ranks_is_named_with_the_parameters(
    shape: tuple[int, ...], use_orig_params: bool, rank: int
) -> None:
    with pytest.warns(UserWarning, match="over a single rank has nothing to shard"):
        model = FSDP(
            Net(),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            device_mesh=init_device_mesh("cpu", shape),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
        )
    (told,) = _steps(model, rank)
    assert f"averaged over 1 of the 2 ranks of device_mesh {shape}" in told
    assert "'embedding.weight' of unit" in told
    assert "HYBRID_SHARD" in told


@pytest.mark.of_guards
@on_ranks(4)
def test_a_mesh_of_which_a_strategy_uses_one_dim_of_several_is_named(rank: int) -> None:
    """Two halves of ranks train unconnected."""
    strategy = ShardingStrategy.FULL_SHARD
    model = wrapped(Net(), device_mesh=init_device_mesh("cpu", (2, 2)), sharding_strategy=strategy)
    (told,) = _steps(model, rank)
    assert "averaged over 2 of the 4 ranks of device_mesh (2, 2)" in told
    hybrid = wrapped(
        Net(), device_mesh=init_device_mesh("cpu", (2, 2)), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    assert _steps(hybrid, rank) == []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert _steps(wrapped(Net(), device_mesh=mesh["dp"]), rank) == []
