"""A whole optimizer state dict that only rank 0 has: its description goes to all, its tensors one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm import Axis, exchange_bytes
from fsdp_flat.errors import UnsupportedError, UsageError
from fsdp_flat.optim_state.names import ParamNames

__all__ = ["FromRankZero", "shared_from_rank_zero"]


class FromRankZero:
    """A tensor that rank 0 of an axis has and the others are about to receive.

    Args:
        tensor: the tensor on rank 0, None elsewhere.
        shape: its shape.
        dtype: its dtype.
        axis: the ranks.
        device: where it is received.
    """

    def __init__(
        self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, device: torch.device
    ) -> None:
        self._tensor = tensor
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._axis = axis
        self._device = device

    def receive(self) -> torch.Tensor:
        """The tensor. Every rank of the axis must call this, in the same order of tensors."""
        if self._tensor is None:
            whole = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        else:
            whole = self._tensor.detach().to(self._device).contiguous()
        if self._axis.group is not None and self._axis.size > 1:
            dist.broadcast(whole, src=dist.get_global_rank(self._axis.group, 0), group=self._axis.group)
        return whole


def shared_from_rank_zero(names: ParamNames, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """``given`` of rank 0 on every rank, with tensors still to be received.

    Every rank must call this.

    Raises:
        UsageError: rank 0 has none.
        UnsupportedError: a value that is neither tensor, number, string, list nor None.
    """
    unit = names.handles[0][0]
    axis, device = unit.options.groups.primary, unit.options.device
    if axis.group is None or axis.size == 1:
        return dict(given or {})
    payload = json.dumps(_described(given)).encode() if axis.rank == 0 and given else b""
    header = exchange_bytes(payload, axis.group, device)[0]
    if not header:
        raise UsageError("Rank 0 of the group has no optimizer state dict to share; pass it there.")
    described = json.loads(header)
    state = {
        name: {key: _value(given, name, key, entry, axis, device) for key, entry in row.items()}
        for name, row in described["state"].items()
    }
    groups = [{key: _setting_from(value) for key, value in group.items()} for group in described["param_groups"]]
    return {"state": state, "param_groups": groups}


def _described(given: Mapping[str, Any]) -> dict[str, Any]:
    state = {
        name: {key: _entry(name, key, value) for key, value in row.items()} for name, row in given["state"].items()
    }
    groups = [{key: _setting(value) for key, value in group.items()} for group in given["param_groups"]]
    return {"state": state, "param_groups": groups}


def _setting(value: Any) -> Any:
    """A group's setting as JSON, which has no tuples (Adam's betas)."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return {"tuple": list(value)} if isinstance(value, tuple) else value


def _setting_from(value: Any) -> Any:
    return tuple(value["tuple"]) if isinstance(value, dict) else value


def _entry(name: str, key: str, value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor) and value.dim():
        return ["tensor", str(value.dtype), list(value.shape)]
    if isinstance(value, torch.Tensor):
        return ["scalar", str(value.dtype), value.item()]
    if isinstance(value, (int, float, str, bool, type(None))):
        return ["value", "", value]
    raise UnsupportedError(
        f"State {key!r} of {name!r} is a {type(value).__name__}, which cannot be sent to other ranks."
    )


def _value(
    given: Mapping[str, Any] | None, name: str, key: str, entry: list[Any], axis: Axis, device: torch.device
) -> Any:
    kind, dtype_name, value = entry
    if kind == "value":
        return value
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    if kind == "scalar":
        return torch.tensor(value, dtype=dtype)
    own = given["state"][name][key] if axis.rank == 0 and given is not None else None
    return FromRankZero(own, tuple(value), dtype, axis, device)
