"""Converts values of state dicts for parameters that units of ``fully_shard`` show as DTensors.

Such values are DTensors with the parameter's mesh and placements, as torch saves and loads them; the codecs, which
convert flat shards, have no part in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_flat.errors import LoadError
from fsdp_flat.flat import DTensorViews
from fsdp_flat.state._torch import full_tensor, shape_of
from fsdp_flat.state.param_index import IndexedParam


def without_dtensors(value: Any, *, to_cpu: bool) -> Any:
    """Return the full tensor of a DTensor, and any other value itself. Every rank of its mesh must call this."""
    if not isinstance(value, DTensor):
        return value
    full = full_tensor(value).detach()
    return full.cpu() if to_cpu else full


def local_from(param: IndexedParam, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, as the parameter is sharded; nothing is communicated."""
    return _views(param).distribute(param.index, full).to_local()


def empty_dtensor(param: IndexedParam, dtype: torch.dtype, device: torch.device) -> DTensor:
    """Create a DTensor with the parameter's mesh and placements."""
    full = torch.empty(param.shown.shape, dtype=dtype, device="meta")
    local = torch.empty_like(local_from(param, full), device=device)
    return _views(param).with_local(param.index, local)


def dtensor_from(param: IndexedParam, value: Any, label: str) -> DTensor:
    """Return a copy of a value of a state dict as a DTensor with the parameter's mesh and placements.

    Args:
        param: the parameter.
        value: a DTensor with that mesh and these placements, or a full tensor.
        label: the value's name, for the error text.

    Raises:
        LoadError: it is none of these, or has another shape.
    """
    shown = param.shown
    assert isinstance(shown, DTensor)
    if shape_of(value) != tuple(shown.shape):
        raise LoadError(
            f"{label} has shape {shape_of(value)}; expected {tuple(shown.shape)}, that of the parameter, which "
            "fully_shard has sharded. Is it the state dict of another model?"
        )
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) != (shown.device_mesh, shown.placements):
            raise LoadError(
                f"{label} is a DTensor on {value.device_mesh} with placements {value.placements}; the parameter is on "
                f"{shown.device_mesh} with {shown.placements}. Load full tensors, or read the checkpoint by "
                "torch.distributed.checkpoint into the state dict of this optimizer."
            )
        local = value.to_local()
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        local = local_from(param, value)
    else:
        raise LoadError(
            f"{label} is a {type(value).__name__}; a parameter that fully_shard has sharded takes a full tensor or a "
            "DTensor. Save full tensors, or by torch.distributed.checkpoint."
        )
    return _views(param).with_local(param.index, local.detach().to(param.handle.flat_param.device, copy=True))


def _views(param: IndexedParam) -> DTensorViews:
    views = param.handle.views
    assert isinstance(views, DTensorViews)
    return views
