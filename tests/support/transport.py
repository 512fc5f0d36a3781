"""How worker ranks communicate and where they compute: gloo on the CPU, or NCCL on one GPU that all of them share."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


@dataclass(frozen=True, slots=True)
class Transport:
    """Describes the default group of a pool of ranks, and their device.

    Attributes:
        backend: that of the group.
        device: where tensors that tests create are, unless they say where.
    """

    backend: str
    device: str

    def environ(self, rank: int) -> dict[str, str]:
        """Return what a rank needs in its environment before it uses the device."""
        if self.backend != "nccl":
            return {}
        return {
            # NCCL refuses two ranks on one device of one host, so each rank says that it is another host. Between
            # hosts it uses sockets, here of the loopback interface; kernels and streams are those of any other run.
            "NCCL_HOSTID": f"rank{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            # A mesh would else give each rank the device of its own number.
            "LOCAL_RANK": "0",
            # Channels take memory and threads; ranks share the processors of one device.
            "NCCL_MAX_NCHANNELS": "2",
        }


GLOO = Transport("gloo", "cpu")
NCCL = Transport("nccl", "cuda:0")
TRANSPORTS = {each.backend: each for each in (GLOO, NCCL)}

_current = GLOO


def rank_device() -> torch.device:
    """Return the device on which this process computes: the CPU, but for ranks of a pool over NCCL."""
    return torch.device(_current.device)


def mesh_type() -> str:
    """Return the type of device of meshes of this process."""
    return rank_device().type


def set_transport(transport: Transport, rank: int) -> None:
    """Prepare this process to be a rank of a pool. Call this before it uses the device."""
    global _current
    _current = transport
    os.environ.update(transport.environ(rank))
    if transport.device != "cpu":
        torch.cuda.set_device(rank_device())
        # Convolutions of two classes are compared to more digits than TF32 has.
        torch.backends.cudnn.allow_tf32 = False


@contextmanager
def on_rank_device() -> Iterator[None]:
    """Create the tensors of a test on the rank's device inside the block."""
    if rank_device().type == "cpu":
        yield
        return
    # torch says so of barriers of a group that has no device of its own.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    warnings.filterwarnings("ignore", message="No device id is provided via `init_process_group` or `barrier")  # 2.8
    with CreatesOn(rank_device()):
        yield


# Code that creates tensors where it needs them.
_LIBRARIES = ("fsdp_flat", "torch.distributed", "torch.optim", "torch.amp", "torch.utils.checkpoint", "torch._dynamo")
# What makes a tensor of one that has a device already.
_KEEP_THE_DEVICE: tuple[Callable[..., Any], ...] = (torch.as_tensor, torch.asarray)


class CreatesOn(TorchFunctionMode):
    """Creates tensors of tests, and of modules that tests make, on a device, where no device is given.

    ``torch.set_default_device`` would move the tensors of libraries too, and refuse generators of the CPU, by which
    ranks make equal numbers: here numbers are made on the CPU, then moved. The list of functions that create tensors
    is private in torch.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        moves = func in _device_constructors() and options.get("device") is None and options.get("out") is None
        if func in _KEEP_THE_DEVICE and isinstance(next(iter((*args, *options.values())), None), torch.Tensor):
            moves = False
        if not moves or not _is_called_by_a_test(inspect.currentframe()):
            return func(*args, **options)
        if options.get("generator") is None:
            return func(*args, **{**options, "device": self._device})
        requires_grad = options.pop("requires_grad", False)
        return func(*args, **options).to(self._device).requires_grad_(requires_grad)


def _is_called_by_a_test(frame: FrameType | None) -> bool:
    """Return whether code of tests comes before that of a library, from the innermost frame on."""
    own = sys.modules[__name__].__name__
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("tests.") and name != own:
            return True
        if name.startswith(_LIBRARIES):
            return False
        frame = frame.f_back
    return False
