"""Collects the private names of torch that this package needs, each with its reason."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors without memory that choose the operators of a real device, which those on the meta device do not, and what
# they raise if a program reads values; a reference that tells whether a storage is alive; and the class of modes that
# see each operation inside their block. torch's documentation describes the first and the last.
__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "storage_info",
]


def storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Describe where a part of a distributed checkpoint is in its files, by a class that has no public name.

    It is slow to import, with torch's own FSDP, so only those who write such files do.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(relative_path, offset, length)
