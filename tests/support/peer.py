"""Provides torch's FSDP1 as a reference on CPU and gloo, with fixes for defects that would crash the comparison.

Only for functions that run on worker ranks, since the fixes stay in the process.
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
from torch.distributed.fsdp import _optim_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle

__all__ = ["PeerFSDP", "mend_peer", "peer_fsdp", "peer_warnings_silenced"]

_ORIGINAL_TO_CPU = FlatParamHandle.to_cpu
_ORIGINAL_UNFLATTEN = _optim_utils._unflatten_orig_param_states


def peer_fsdp(module: nn.Module, **kwargs: Any) -> PeerFSDP:
    """Wrap ``module`` in torch's FSDP1, computing on the CPU. Every rank of the group must call this.

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
    """Ignore torch's deprecation warnings about FSDP1, and no other warning."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"torch\.")
            warnings.filterwarnings("ignore", message=r"(?s).*deprecat", category=category)
        yield


def mend_peer() -> None:
    """Fix two defects of torch 2.13 for handles that compute on the CPU.

    ``FlatParamHandle.to_cpu`` frees the storage that it returns, so a full state dict with ``offload_to_cpu=True``
    reads freed memory; fixed by doing nothing. The full optimizer state of original parameters with
    ``offload_to_cpu=True`` consists of views of a buffer that the next state overwrites; fixed by cloning them, as
    without offloading.
    """
    FlatParamHandle.to_cpu = _to_cpu  # type: ignore[method-assign, assignment]
    _optim_utils._unflatten_orig_param_states = _unflatten  # type: ignore[assignment]


def _to_cpu(self: FlatParamHandle) -> AbstractContextManager[None]:
    if self.device.type == "cpu":
        return nullcontext()
    return _ORIGINAL_TO_CPU(self)


def _unflatten(
    fsdp_param_info: Any, output_states: Any, state_name: str, shard_state: bool, to_save: bool, cpu_offload: bool
) -> None:
    copies = cpu_offload and fsdp_param_info.handle.device.type != "cpu"
    _ORIGINAL_UNFLATTEN(fsdp_param_info, output_states, state_name, shard_state, to_save, copies)
