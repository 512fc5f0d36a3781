"""torch's own FSDP1 as a reference on CPU and gloo, with the defects mended that would crash the comparison.

Only for functions that run on worker ranks: the mending stays in the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle

__all__ = ["PeerFSDP", "mend_peer", "peer_fsdp", "peer_warnings_silenced"]

_ORIGINAL_TO_CPU = FlatParamHandle.to_cpu


def peer_fsdp(module: nn.Module, **kwargs: Any) -> PeerFSDP:
    """torch's FSDP1 around ``module``, computing on the CPU. Every rank of the group must call this.

    Args:
        module: the module to wrap; its parameters are replaced.
        kwargs: FSDP1's own arguments.
    """
    if not dist.is_initialized():
        raise RuntimeError("peer_fsdp is for functions that run on worker ranks: ranks(2).run(function)")
    mend_peer()
    kwargs.setdefault("device_id", torch.device("cpu"))
    with peer_warnings_silenced():
        return PeerFSDP(module, **kwargs)


@contextmanager
def peer_warnings_silenced() -> Iterator[None]:
    """Ignore that torch calls its FSDP1 interface deprecated, and no other warning."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"torch\.")
            warnings.filterwarnings("ignore", message=r"(?s).*deprecat", category=category)
        yield


def mend_peer() -> None:
    """Make ``FlatParamHandle.to_cpu`` do nothing where the handle computes on the CPU.

    In torch 2.13 it frees the very storage that it hands out there, so a full state dict with
    ``offload_to_cpu=True`` reads freed memory.
    """
    FlatParamHandle.to_cpu = _to_cpu  # type: ignore[method-assign, assignment]


def _to_cpu(self: FlatParamHandle) -> AbstractContextManager[None]:
    if self.device.type == "cpu":
        return nullcontext()
    return _ORIGINAL_TO_CPU(self)
