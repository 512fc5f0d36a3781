"""Places the ranks of a test on several hosts, between which they do not share memory, and trains there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat.comm.shm import connect

from .beside import Beside
from .kit import Stack


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
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    Beside(Stack(), "fully_shard", mesh=mesh).train(num_steps=3)
