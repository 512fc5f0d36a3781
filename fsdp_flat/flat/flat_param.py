"""Creates flat parameters, the tensors that an optimizer holds with ``use_orig_params=False``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_flat.flat.guards import ShardedFlatParameter

__all__ = ["FlatParameter", "copy_flat_parameter", "new_flat_parameter"]


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """Identifies flat parameters: ``isinstance(t, FlatParameter)`` is true for every unit's flat parameter.

    As in FSDP1, callers cannot construct one.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> FlatParameter:
        raise TypeError("FlatParameter is a type to test against; units make their flat parameters themselves.")


def new_flat_parameter(shard: torch.Tensor, *, requires_grad: bool, is_sharded: bool) -> nn.Parameter:
    """Create a flat parameter whose data is ``shard``.

    Args:
        shard: the data, 1-D, the rank's elements and their padding.
        requires_grad: whether it gets a gradient.
        is_sharded: whether optimizers hold it and other ranks hold other elements.
    """
    if is_sharded:
        return _marked(ShardedFlatParameter.of(shard, requires_grad=requires_grad))
    return _marked(nn.Parameter(shard, requires_grad=requires_grad))


def copy_flat_parameter(flat_param: nn.Parameter, copied: nn.Parameter | None = None) -> nn.Parameter:
    """Return a flat parameter with a copy of the shard: ``copied`` if ``copy.deepcopy`` has already created one."""
    if copied is not None:
        return _marked(ShardedFlatParameter.guard(copied) if isinstance(flat_param, ShardedFlatParameter) else copied)
    shard = flat_param.data.clone()
    # Offloaded shards are in pinned memory.
    shard = shard.pin_memory() if flat_param.data.is_pinned() else shard
    is_sharded = isinstance(flat_param, ShardedFlatParameter)
    return new_flat_parameter(shard, requires_grad=flat_param.requires_grad, is_sharded=is_sharded)


def _marked(flat_param: nn.Parameter) -> nn.Parameter:
    flat_param._is_flat_param = True  # type: ignore[attr-defined]
    flat_param._fsdp_flattened = True  # type: ignore[attr-defined]
    return flat_param
