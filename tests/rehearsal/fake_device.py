"""An accelerator without hardware: torch's meta device, whose tensors have storages and autograd but no values.

The library takes every branch that it takes on an accelerator, since the device is not the CPU. Values cannot be
looked at, so nothing that makes the host wait for a value goes by unnoticed: ``memory`` reports it and gives zeros or
ones. FakeTensorMode with ``device="cuda"`` was tried first; a torch that is built without CUDA cannot run ``copy_`` or
a backward under it ("PyTorch is not linked with support for cuda devices").

What differs from CUDA and is bridged here: meta tensors report ``is_meta``, which the library takes for a model that
has no weights yet; ``torch.tensor(..., device=...)`` goes past dispatch modes; memory cannot be pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.rehearsal.memory import MemoryRecorder
from tests.rehearsal.streams import Machine

__all__ = ["DEVICE", "fake_accelerator"]

DEVICE = torch.device("meta")


class _TensorsFromValues(TorchFunctionMode):
    """Reports tensors that are made of Python values on the accelerator: a blocking copy of pageable memory."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device.type == self._machine.device.type:
            data = args[0] if args else (kwargs or {}).get("data")
            if not isinstance(data, torch.Tensor):
                stream = self._machine.current
                self._machine.host_wait("blocking copy", f"{func.__name__} of Python values", stream.clock)
        return result


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
        _TensorsFromValues(machine),
        recorder,
    ):
        yield
