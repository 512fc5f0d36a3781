"""The flat parameter: the tensor that an optimizer holds when original parameters are not used."""

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
    """Type to test against: ``isinstance(t, FlatParameter)`` is true for every unit's flat parameter.

    As in FSDP1 there is no way to construct one.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> FlatParameter:
        raise TypeError("FlatParameter is a type to test against; units make their flat parameters themselves.")


def new_flat_parameter(shard: torch.Tensor, *, requires_grad: bool, is_part: bool) -> nn.Parameter:
    """A flat parameter whose data is ``shard`` (1-D, the rank's elements and their padding).

    Args:
        shard: the data.
        requires_grad: whether it is to get a gradient.
        is_part: optimizers hold it, and other ranks hold other elements.
    """
    if is_part:
        return _marked(ShardedFlatParameter.of(shard, requires_grad=requires_grad))
    return _marked(nn.Parameter(shard, requires_grad=requires_grad))


def copy_flat_parameter(flat_param: nn.Parameter, copied: nn.Parameter | None = None) -> nn.Parameter:
    """A flat parameter with a copy of the shard; ``copied`` is one that ``copy.deepcopy`` has made already."""
    if copied is not None:
        return _marked(ShardedFlatParameter.guard(copied) if isinstance(flat_param, ShardedFlatParameter) else copied)
    shard = flat_param.data.clone()
    # Offloaded shards are in pinned memory.
    shard = shard.pin_memory() if flat_param.data.is_pinned() else shard
    is_part = isinstance(flat_param, ShardedFlatParameter)
    return new_flat_parameter(shard, requires_grad=flat_param.requires_grad, is_part=is_part)


def _marked(flat_param: nn.Parameter) -> nn.Parameter:
    flat_param._is_flat_param = True  # type: ignore[attr-defined]
    flat_param._fsdp_flattened = True  # type: ignore[attr-defined]
    return flat_param
