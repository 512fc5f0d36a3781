"""Maps torch's built-in low-precision communication hooks to the dtypes in which they communicate.

The hooks cast, call the backend and cast back; gloo has no kernels for some of their calls. A reduction in the hook's
dtype gives the same result on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

__all__ = ["LOW_PRECISION_HOOKS"]

LOW_PRECISION_HOOKS: Mapping[Callable[..., Any], torch.dtype] = MappingProxyType(
    {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}
)
"""Dtype in which each hook communicates gradients."""
