"""Finds writes to memory that the library has freed, and lets reads from it show.

Inside :func:`checked` memory that the library frees on the CPU is not given back: it stays here, and all its bits are
set, which is NaN as floats. A comparison finds what wrote to it: a thread of gloo, a collective that was given up, a
stale view. Whatever reads from it, or sends it to another rank, gets NaN. What the library keeps for a collective
that was given up counts as freed once the library lets go of it.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fsdp_flat.comm import given_up
from fsdp_flat.core.buffers import MemoryPool
from fsdp_flat.core.torch_core import swap_memory

# Folders whose tests run under the check in any case; with the environment variable all do.
_FOLDERS = ("tests.differing_ranks.", "tests.errors.")
_VARIABLE = "FSDP_FLAT_CHECK_FREED"
_FILL = 255
_MOST_NBYTES = 1 << 28
# Blocks, each with the place where it was freed.
_freed: deque[tuple[torch.UntypedStorage, str]] = deque()
_resize = torch.UntypedStorage.resize_


def is_checked(module: str) -> bool:
    """Return whether tests of a module run under the check."""
    return swap_memory is not None and (module.startswith(_FOLDERS) or bool(os.environ.get(_VARIABLE)))


@contextmanager
def checked() -> Iterator[None]:
    """Keep and check memory that the library frees inside the block; raise an AssertionError at its end."""
    with (
        mock.patch.object(torch.UntypedStorage, "resize_", _freeing_resize),
        mock.patch.object(MemoryPool, "empty", _empty),
        mock.patch.object(given_up, "drop_completed", _dropping),
    ):
        yield
    if found := damaged():
        raise AssertionError("\n".join(found))


def damaged() -> list[str]:
    """Return a text for each freed block that was written to since; a block is named once."""
    found = [
        f"{block.nbytes()} freed bytes were written to, freed at:\n{place}" for block, place in _freed if _is(block)
    ]
    for block, _ in _freed:
        _bytes_of(block).fill_(_FILL)
    while sum(block.nbytes() for block, _ in _freed) > _MOST_NBYTES:
        _freed.popleft()
    return found


def _is(block: torch.UntypedStorage) -> bool:
    return bool((_bytes_of(block) != _FILL).any())


def _bytes_of(block: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(block)  # type: ignore[call-overload,no-any-return]


def _keep(storage: torch.UntypedStorage) -> None:
    block = torch.UntypedStorage(0)
    swap_memory(block, storage)
    _bytes_of(block).fill_(_FILL)
    _freed.append((block, "".join(traceback.format_stack(limit=8)[:-2])))


def _freeing_resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
    if nbytes == 0 < storage.nbytes() and storage.device.type == "cpu" and storage.resizable():
        _keep(storage)
        return storage
    return _resize(storage, nbytes)


def _empty(_: MemoryPool, storage: torch.UntypedStorage) -> None:
    """Free memory at once that a pool would give to another buffer."""
    if storage.resizable():
        storage.resize_(0)


def _dropping() -> None:
    """Let go of collectives that were given up and are complete; keep their memory here."""
    for pending in [pending for pending in given_up._kept if pending.is_completed()]:
        for block in given_up._kept.pop(pending):
            if isinstance(block, torch.UntypedStorage) and block.nbytes():
                _keep(block)
