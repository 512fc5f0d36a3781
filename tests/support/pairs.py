"""A sharded model beside its plain replica, through the public interface alone, in fp64."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from tests.support import assert_close, kit
from tests.support.kit import BLOCKS, Block, full_grads, full_params, mesh, square_loss, wrapped

WIDTH = 8
ROWS = 3
KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
MEMORY = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
# Names of strategies; hybrid ones with the shape of their mesh, replicas by shards.
TWO_RANKS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 1x2")
FOUR_RANKS = ("FULL_SHARD", "HYBRID_SHARD 2x2", "HYBRID_SHARD 4x1")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

# loss_of(model, batch, rank): ranks may compute different things.
LossOf = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]


def placed(layout: str, *, shared_memory: bool = True) -> dict[str, Any]:
    """Arguments of the constructor for a strategy, with new groups. Every rank must call this.

    Args:
        layout: a name of ``ShardingStrategy``; for a hybrid one and " 2x1", the shape of the mesh.
        shared_memory: False has ranks exchange tensors by gloo.
    """
    name, _, shape = layout.partition(" ")
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[name]}
    if not shared_memory:
        # Read at the first collective of a group, so the groups have to be new.
        os.environ["FSDP_FLAT_SHARED_MEMORY"] = "0"
    if not shape:
        return {**options, "process_group": dist.new_group()}
    num_replicas, num_shards = map(int, shape.split("x"))
    if shared_memory:
        return {**options, "device_mesh": mesh(num_replicas, num_shards)}
    grid = torch.arange(num_replicas * num_shards).view(num_replicas, num_shards)
    return {**options, "process_group": (_own_group(grid.tolist()), _own_group(grid.t().tolist()))}


def _own_group(rows: Sequence[Sequence[int]]) -> Any:
    groups = [dist.new_group(list(row)) for row in rows]
    return next(group for group, row in zip(groups, rows, strict=True) if dist.get_rank() in row)


def by_policy(module: nn.Module, **kwargs: Any) -> FSDP:
    """Every block as a unit, by an auto-wrap policy."""
    return wrapped(module, auto_wrap_policy=BLOCKS, **kwargs)


def by_hand(module: nn.Module, **kwargs: Any) -> FSDP:
    """Every block as a unit, wrapped one by one."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Block):
                setattr(parent, name, wrapped(child, **kwargs))
    return wrapped(module, **kwargs)


batch = functools.partial(kit.batch, dtype=torch.float64)


def by_plain_names(values: dict[str, Any]) -> dict[str, Any]:
    """Rename values of modules that a test has put inside a recording module (``inner_of_recording``)."""
    return {name.replace("inner_of_recording.", ""): value for name, value in values.items()}


@dataclass
class Pair:
    """A sharded model and a plain replica of the same weights, trained on the same data."""

    model: FSDP
    plain: nn.Module
    use_orig_params: bool

    @classmethod
    def of(cls, module: nn.Module, *, wrap: Callable[..., FSDP] = by_policy, **kwargs: Any) -> Pair:
        module = module.double()
        plain = copy.deepcopy(module)
        return cls(wrap(module, **kwargs), plain, bool(kwargs.get("use_orig_params", False)))

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()

    def backward(self, loss_of: LossOf = square_loss, step: int = 0) -> None:
        """One backward of the sharded model on this rank's batch, and of the replica on all of them."""
        rank = dist.get_rank()
        loss_of(self.model, batch(rank, step), rank).backward()
        self.follow(loss_of, step)

    def follow(self, loss_of: LossOf = square_loss, step: int = 0) -> None:
        """The replica's backward of the mean over all ranks."""
        num_ranks = dist.get_world_size()
        for rank in range(num_ranks):
            (loss_of(self.plain, batch(rank, step), rank) / num_ranks).backward()

    def check_gradients(self, what: str = "gradients") -> None:
        """Gradients are the replica's: None where it has none, or zero where they are part of a flat one."""
        actual = by_plain_names(full_grads(self.model))
        expected = {name: param.grad for name, param in self.plain.named_parameters()}
        if not self.use_orig_params:
            for name, grad in expected.items():
                if grad is None and actual[name] is not None:
                    expected[name] = torch.zeros_like(actual[name])
        assert_close(actual, expected, **CLOSE, what=what)

    def check_parameters(self) -> None:
        expected = {name: param.detach() for name, param in self.plain.named_parameters()}
        assert_close(by_plain_names(full_params(self.model)), expected, **CLOSE, what="parameters")

    def step(self, lr: float = 0.1) -> None:
        """One step of plain gradient descent of both."""
        for model in (self.model, self.plain):
            torch.optim.SGD(model.parameters(), lr=lr).step()
        self.zero_grad()

    def train(self, loss_of: LossOf = square_loss, num_steps: int = 1, *, first: int = 0) -> None:
        """Whole steps, compared after each backward and at the end."""
        for step in range(first, first + num_steps):
            self.backward(loss_of, step)
            self.check_gradients(f"gradients of step {step}")
            self.step()
        self.check_parameters()
