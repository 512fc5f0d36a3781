"""Provides torch's FSDPs as references on CPU and gloo, with fixes for defects that would fail the comparison.

Only for functions that run on worker ranks, since the fixes stay in the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, _optim_utils, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from .transport import rank_device

_ORIGINAL_TO_CPU = FlatParamHandle.to_cpu
_ORIGINAL_UNFLATTEN = _optim_utils._unflatten_orig_param_states
_ORIGINAL_FACTORS = _fsdp_collectives._get_gradient_divide_factors


def peer_fsdp(module: nn.Module, **kwargs: Any) -> PeerFSDP:
    """Wrap ``module`` in torch's FSDP1, computing on the rank's device. Every rank of the group must call this.

    Args:
        module: the module to wrap; its parameters are replaced.
        kwargs: FSDP1's own arguments.
    """
    if not dist.is_initialized():
        raise RuntimeError("peer_fsdp is for functions that run on worker ranks: ranks(2).run(function)")
    mend_peer()
    kwargs.setdefault("device_id", rank_device())
    with peer_warnings_silenced():
        return PeerFSDP(module, **kwargs)


def peer_fully_shard(module: Any, **kwargs: Any) -> Any:
    """Call torch's ``fully_shard``. Every rank of the mesh must call this.

    Args:
        module: the module or modules to shard.
        kwargs: torch's arguments; ``mp_policy`` may be ours, and means what it means to torch before 2.15.
    """
    mend_peer()
    if "mp_policy" in kwargs:
        fields = dict(vars(kwargs["mp_policy"]))
        # Where torch's class has this field, gradients are not reduced in param_dtype unless told so.
        if hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
            fields["reduce_dtype"] = fields["reduce_dtype"] or fields["param_dtype"]
        kwargs["mp_policy"] = MixedPrecisionPolicy(**fields)
    return fully_shard(module, **kwargs)


def needs_of_torch(method: str) -> pytest.MarkDecorator:
    """Skip a test that compares with a method of torch's FSDPModule where the installed torch does not have it."""
    has_it = hasattr(FSDPModule, method)
    return pytest.mark.skipif(not has_it, reason=f"FSDPModule of torch {torch.__version__} has no {method}")


@contextmanager
def peer_warnings_silenced() -> Iterator[None]:
    """Ignore torch's deprecation warnings about FSDP1, and no other warning."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"torch\.")
            warnings.filterwarnings("ignore", message=r"(?s).*deprecat", category=category)
        yield


def mend_peer() -> None:
    """Fix two defects of torch 2.13's FSDP1 and one of torch 2.8's FSDP2, for models that compute on the CPU.

    ``FlatParamHandle.to_cpu`` frees the storage that it returns, so a full state dict with ``offload_to_cpu=True``
    reads freed memory; fixed by doing nothing. The full optimizer state of original parameters with
    ``offload_to_cpu=True`` consists of views of a buffer that the next state overwrites; fixed by cloning them, as
    without offloading. The reduce-scatter of a mean that FSDP2 asks gloo for is a sum in torch 2.8; fixed by dividing
    before it.
    """
    FlatParamHandle.to_cpu = _to_cpu  # type: ignore[method-assign, assignment]
    _optim_utils._unflatten_orig_param_states = _unflatten  # type: ignore[assignment]
    # Only a collective could show it. This is right in the versions in between too, which were not tested.
    if torch.__version__ < "2.11":
        _fsdp_collectives._get_gradient_divide_factors = _without_means


def _to_cpu(self: FlatParamHandle) -> AbstractContextManager[None]:
    if self.device.type == "cpu":
        return nullcontext()
    return _ORIGINAL_TO_CPU(self)


def _unflatten(
    fsdp_param_info: Any, output_states: Any, state_name: str, shard_state: bool, to_save: bool, cpu_offload: bool
) -> None:
    copies = cpu_offload and fsdp_param_info.handle.device.type != "cpu"
    _ORIGINAL_UNFLATTEN(fsdp_param_info, output_states, state_name, shard_state, to_save, copies)


def _without_means(shard_group: Any, replicate_group: Any, *args: Any) -> Any:
    factors = _ORIGINAL_FACTORS(shard_group, replicate_group, *args)
    if factors[2:] != (dist.ReduceOp.AVG, dist.ReduceOp.AVG):
        return factors
    size = shard_group.size() * (1 if replicate_group is None else replicate_group.size())
    return float(size), None, dist.ReduceOp.SUM, dist.ReduceOp.SUM
