"""Holds background saves back, so that a test decides when they write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fsdp_flat.checkpoint import CheckpointSave


@contextmanager
def held(until: threading.Event) -> Iterator[None]:
    """Have the threads of saves that are started in the block wait for an event before they write."""
    start = CheckpointSave._run

    def run(save: CheckpointSave, work: Callable[[], None], *args: Any) -> None:
        start(save, lambda: (until.wait(), work()), *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointSave, "_run", run)
        yield
