"""An accelerator without hardware: torch's meta device, whose tensors have storages and autograd but no values.

The library takes every branch that it takes on an accelerator, since the device is not the CPU. Values cannot be
looked at, so nothing that makes the host wait for a value goes by unnoticed: ``memory`` reports it and gives zeros or
ones. FakeTensorMode with ``device="cuda"`` was tried first; under a torch that is built without CUDA ``copy_`` raises
there ("PyTorch is not linked with support for cuda devices") and autograd ends the process.

Three differences from CUDA are bridged here: meta tensors report ``is_meta``, which the library takes for a model that
has no weights yet; ``torch.tensor(..., device=...)`` goes past dispatch modes; memory cannot be pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from tests.rehearsal.memory import MemoryRecorder
from tests.rehearsal.streams import Machine

DEVICE = torch.device("meta")
# torch keeps the list of functions that create tensors from its first use on, which must not be inside a block below.
_device_constructors()


def _reporting(machine: Machine, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Report tensors that ``make`` makes of Python values on the accelerator: blocking copies of pageable memory."""

    def made(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = make(data, *args, **kwargs)
        if result.device.type == machine.device.type and not isinstance(data, torch.Tensor):
            machine.host_wait("blocking copy", f"{make.__name__} of Python values", machine.current.clock)
        return result

    return made


@contextmanager
def fake_accelerator(machine: Machine, recorder: MemoryRecorder) -> Iterator[None]:
    """Let the meta device be an accelerator inside the block."""
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        return recorder.resize_storage(resize, storage, nbytes)

    def synchronize(_device: Any = None) -> None:
        machine.synchronize("accelerator.synchronize")

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize_storage),
        mock.patch.object(torch.Tensor, "is_meta", property(lambda _tensor: False), create=True),
        mock.patch.object(torch.accelerator, "current_stream", machine.current_stream),
        mock.patch.object(torch.accelerator, "synchronize", synchronize),
        mock.patch.object(torch, "tensor", _reporting(machine, torch.tensor)),
        mock.patch.object(torch, "as_tensor", _reporting(machine, torch.as_tensor)),
        recorder,
    ):
        yield
