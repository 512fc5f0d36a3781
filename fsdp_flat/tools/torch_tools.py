"""Collects the private names of torch that this package needs, each with its reason."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors without memory that choose the operators of a real device, which those on the meta device do not, and what
# they raise if a program reads values; a reference that tells whether a storage is alive; and the class of modes that
# see each operation inside their block. torch's documentation describes the first and the last. And where a part of a
# distributed checkpoint is in its files, which has no public name.
__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "StorageInfo",
    "StorageWeakRef",
    "TorchDispatchMode",
]
