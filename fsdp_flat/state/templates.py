"""Creates empty optimizer states to read a checkpoint into, independent of the optimizer's current state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fsdp_flat.errors import LoadError
from fsdp_flat.state.boxed import boxed_value
from fsdp_flat.state.handlers import DeferredState
from fsdp_flat.state.optim_params import names_of
from fsdp_flat.state.owned import owners_by_slot

__all__ = ["template_states"]

Wanted = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]


def template_states(
    model: nn.Module,
    wanted: Wanted,
    read: Callable[[str, str, torch.Tensor], torch.Tensor],
    *,
    owners: Mapping[nn.Parameter, int],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, DeferredState]]]:
    """Create zero tensors for optimizer states on the CPU; those of managed parameters are boxes of this rank's shards.

    Args:
        model: the model that has the parameters.
        wanted: by parameter name and state name, the full shape and the dtype.
        read: reads one state into a tensor for it, and returns that tensor.
        owners: by parameter whose states one rank of the shard group has in full, that rank.

    Returns:
        The tensors; and the states that have a handler or an owner, which are full tensors read on demand.

    Raises:
        LoadError: a name or shape does not fit the model.
    """
    names = names_of(model)
    sharded = {fqn: (unit, handle, i) for unit, handle, fqns in names.handles for i, fqn in enumerate(fqns)}
    owned = owners_by_slot(names, owners)
    others = {name: tuple(param.shape) for param, name in names.others.items()}
    found: dict[str, dict[str, torch.Tensor]] = {}
    deferred: dict[str, dict[str, DeferredState]] = {}
    for fqn, states in wanted.items():
        if fqn not in sharded and fqn not in others:
            raise LoadError(
                f"The optimizer state of {fqn!r} belongs to no parameter of this model. Nothing was loaded."
            )
        for name, (shape, dtype) in states.items():
            if fqn in sharded and (name in sharded[fqn][0].optim_state_handlers or sharded[fqn][1:] in owned):
                # Saved as a full tensor, in a shape that only the handler or the optimizer defines.
                deferred.setdefault(fqn, {})[name] = _deferred(fqn, name, shape, dtype, read)
                continue
            if fqn in others:
                expected = others[fqn]
                value = torch.zeros(shape, dtype=dtype)
            else:
                _, handle, index = sharded[fqn]
                expected = handle.views.params[index].adapter.full_shape(handle.layout.param_infos[index].shape)
                value = boxed_value(handle, index, torch.zeros(handle.views.local_shards[index].numel, dtype=dtype))
            if shape != expected:
                raise LoadError(
                    f"State {name!r} of {fqn!r} has shape {shape}; expected {expected}, that of the parameter. If a "
                    f"handler made it, register that first: fsdp_flat.register_optim_state_handler(model, {name!r}, "
                    "merge=..., split=...). Nothing was loaded."
                )
            found.setdefault(fqn, {})[name] = value
    return found, deferred


def _deferred(
    fqn: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    read: Callable[[str, str, torch.Tensor], torch.Tensor],
) -> DeferredState:
    return DeferredState(torch.Size(shape), dtype, lambda: read(fqn, name, torch.zeros(shape, dtype=dtype)))
