"""Collects the private names of torch that this package needs, each with its reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import _engine_run_backward
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors without memory that choose the operators of a real device, which those on the meta device do not, and what
# they raise if a program reads values; the store of a process group that sends nothing, whose import registers its
# backend, "fake"; and the class of modes that see each operation inside their block. torch's documentation describes
# the first and the last.
__all__ = [
    "DEVICE_MESH_LOGGER",
    "FAKE_TENSOR_LOGGER",
    "HAS_FUSED_RMS_NORM",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "has_left_fake_mode",
    "known_groups",
    "run_backward",
    "silent",
]

# The logger that prints the traceback of an error which operators without memory raise, and which their caller gets.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
# The logger that warns of a DTensor which is read without process groups.
DEVICE_MESH_LOGGER = "torch.distributed.device_mesh"
# Whether torch has one kernel for RMSNorm on accelerators, which keeps no copies of the input in fp32.
HAS_FUSED_RMS_NORM = hasattr(torch.ops.aten, "_fused_rms_norm")


def has_left_fake_mode() -> bool:
    """Return whether no ``FakeTensorMode`` is active, as where a mesh reads its ranks."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Drop what a logger says inside the block, when an error says it too, or it is expected."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def run_backward(loss: torch.Tensor) -> None:
    """Run the backward of a loss inside the modes that see torch functions, which ``Tensor.backward`` leaves.

    A recomputation in it must call what the forward has called.
    """
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def known_groups() -> set[dist.ProcessGroup]:
    """Return the process groups that torch knows, which no public function lists."""
    return set(dist.distributed_c10d._world.pg_map)
