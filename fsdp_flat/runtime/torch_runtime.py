"""Collects the private names of torch that this package needs, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

# Two classes have no public name: that of all batch norms, which FSDP1 keeps in full precision by default, and that of
# modes that see each operation inside their block.
__all__ = [
    "LOW_PRECISION_HOOKS",
    "BatchNorm",
    "TorchDispatchMode",
    "is_autocast_on",
    "is_replicated",
    "preserve_version",
    "queue_callback",
]

# The dtype in which each of torch's low-precision hooks communicates gradients. The hooks cast, call the backend and
# cast back; gloo has no kernels for some of their calls. A reduction in this dtype gives the same result everywhere.
LOW_PRECISION_HOOKS: Mapping[Callable[..., Any], torch.dtype] = MappingProxyType(
    {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}
)

# Runs a function at the end of the running backward, as DistributedDataParallel and FSDP do.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

# Context in which operations leave the version counter of a tensor as it is, so that values that autograd has saved of
# it stay valid.
preserve_version: Callable[[torch.Tensor], AbstractContextManager[Any]]
preserve_version = torch.autograd._unsafe_preserve_version_counter

# Returns whether autocast is on for any device; the public function takes a device, and raises for one that it does not
# know.
is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate`` was called on ``module``, and so reduces the gradients below it.

    torch's composable functions note on each module which of them were called on it; no public function reads that.
    """
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())
