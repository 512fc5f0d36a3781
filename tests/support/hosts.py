"""Places the ranks of a test on several hosts, between which they do not share memory, and trains there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import fully_shard
from fsdp_flat.comm.shm import connect

from .compare import assert_close
from .kit import Stack, batch, square_loss
from .reference import replicated_step


@contextmanager
def on_hosts(places: str) -> Iterator[None]:
    """Let each rank behave inside the block as if its host were that of its character, such as ``aabb``.

    Every rank must enter and leave the block, in which groups connect anew.
    """
    host = places[dist.get_rank()].encode()
    with (
        mock.patch.object(connect, "_host", return_value=host),
        mock.patch.object(connect, "_connections", WeakKeyDictionary()),
    ):
        yield


def train_fully_shard_beside_a_replica(shape: tuple[int, ...]) -> None:
    """Train a ``fully_shard`` model on a mesh of all ranks, and compare its parameters with a plain replica's.

    Args:
        shape: of the mesh; the last dim shards, one before it replicates.
    """
    module = Stack()
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    model = fully_shard(module, mesh=mesh)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain))
    for step in range(3):
        inputs = [batch(rank, step) for rank in range(dist.get_world_size())]
        replicated_step(plain, plain_optimizer, inputs, square_loss)
        optimizer.zero_grad()
        square_loss(model, inputs[dist.get_rank()]).backward()
        optimizer.step()
        found = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
        expected = {name: param.detach() for name, param in plain.named_parameters()}
        assert_close(found, expected, atol=1e-6, rtol=1e-5, what=f"parameters after step {step}")
