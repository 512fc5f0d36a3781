"""Places the ranks of a test on several hosts: between these, ranks do not share memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_flat.comm.shm import connect


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
