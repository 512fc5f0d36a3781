"""The fake process group of the accelerator rehearsal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.rehearsal.kit import NUM_RANKS


@pytest.fixture(autouse=True, scope="module")
def fake_group() -> Iterator[None]:
    """Rank 1 of four ranks that only pretend to communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()
