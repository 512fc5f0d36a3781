"""``optim_state_dict_to_load``: from states under parameter names to what this rank's optimizer loads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import LoadError, OptionError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.optim_state.names import current_names, is_scalar, names_of
from fsdp_flat.optim_state.rank_zero import FromRankZero, shared_from_rank_zero
from fsdp_flat.runtime import Unit
from fsdp_flat.state_dict import (
    BoxedTensor,
    boxes_to_shard,
    chunks_to_shard,
    dtype_of,
    local_chunk,
    refuse_split,
    shape_of,
)

__all__ = ["load_optim_state"]


def load_optim_state(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    given: Mapping[str, Any] | None,
    *,
    named: bool = False,
    from_rank_zero: bool = False,
) -> dict[str, Any]:
    """The state dict that an optimizer over ``params`` loads, made of ``given``, which is keyed by names.

    Values may be whole tensors or torch's chunked types. Every rank must call this where they are chunked, or where
    only rank 0 has them.

    Args:
        model: the model that the optimizer was built from.
        params: the optimizer's parameters in order.
        given: ``{"state": {name: {...}}, "param_groups": [...]}``.
        named: keys of the result are names as ``model.named_parameters()`` gives them, which is what torch's named
            optimizer has.
        from_rank_zero: only rank 0 of each shard group has ``given``, in whole tensors.

    Raises:
        OptionError: (a ValueError) ``given`` has no ``state`` or no ``param_groups``.
        LoadError: a value does not fit its parameter.
    """
    names = names_of(model)
    if from_rank_zero:
        given = shared_from_rank_zero(names, given)
    for key in ("state", "param_groups"):
        if given is None or key not in given:
            raise OptionError(
                f"An optimizer state dict has 'state' and 'param_groups'; got {sorted(given) if given else given!r}."
            )
    assert given is not None
    ids = names.ids(params)
    shown = current_names(model) if named else {}
    keys: list[Any] = [shown[param] if named else position for position, param in enumerate(params)]
    by_name: dict[str, dict[str, Any]] = given["state"]
    state: dict[Any, dict[str, Any]] = {}
    seen: set[str] = set()
    for unit, handle, fqns in names.handles:
        seen.update(fqns)
        if any(fqn in by_name for fqn in fqns) and any(fqn in ids for fqn in fqns):
            for index, values in _for_handle(unit, handle, fqns, by_name).items():
                fqn = fqns[index]
                if fqn in ids:
                    state[keys[ids[fqn]]] = values
    for name in names.others.values():
        seen.add(name)
        if name in by_name:
            values = {key: _plain(value) for key, value in by_name[name].items()}
            if name in ids:
                state[keys[ids[name]]] = values
    unknown = [name for name in by_name if name not in seen]
    if unknown:
        warnings.warn(
            f"The optimizer state dict has {len(unknown)} name(s) that this model does not have, {unknown[0]!r} "
            "the first; they are left out.",
            stacklevel=4,
        )
    return {"state": state, "param_groups": _groups(ids, keys, given["param_groups"])}


def _groups(ids: dict[str, int], keys: list[Any], given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = []
    for group in given:
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        known = [fqn for fqn in group.get("params", []) if fqn in ids]
        groups.append({**settings, "params": [keys[position] for position in sorted({ids[fqn] for fqn in known})]})
    return groups


def _for_handle(
    unit: Unit, handle: FlatParamHandle, fqns: tuple[str, ...], by_name: dict[str, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """By slot (the first one without original parameters), the states of this rank's visible parameter."""
    rows = [by_name.get(fqn) for fqn in fqns]
    # Sorted: every rank has to exchange in the same order.
    tensor_names = sorted({key for row in rows if row for key, value in row.items() if not is_scalar(value)})
    shards = {
        key: _shard_of(unit, handle, fqns, key, [row.get(key) if row else None for row in rows]) for key in tensor_names
    }
    visible = handle.views.visible_params()
    if len(visible) == 1 and visible[0] is handle.flat_param:
        _check_uniform(unit, fqns, rows)
        first = next(row for row in rows if row is not None)
        plain = {key: _plain(value) for key, value in first.items() if is_scalar(value)}
        return {0: {**shards, **plain}}
    found: dict[int, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        if row is None:
            continue
        piece = handle.views.pieces[index]
        found[index] = {
            key: _plain(value)
            if is_scalar(value)
            else shards[key][piece.in_shard.to_slice()].view(visible[index].shape).clone()
            for key, value in row.items()
        }
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, FromRankZero):
        return value.receive()
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _check_uniform(unit: Unit, fqns: tuple[str, ...], rows: list[dict[str, Any] | None]) -> None:
    have = {fqn: sorted(row) for fqn, row in zip(fqns, rows, strict=True) if row is not None}
    kinds = {tuple(keys) for keys in have.values()}
    lacking = [fqn for fqn in fqns if fqn not in have]
    if len(kinds) > 1 or (lacking and have):
        raise OptionError(
            f"With use_orig_params=False the parameters of unit {unit.name!r} share one state, so each needs the same "
            f"entries; got {have}{', nothing for ' + repr(lacking[0]) if lacking else ''}. Pass use_orig_params=True."
        )


def _shard_of(unit: Unit, handle: FlatParamHandle, fqns: tuple[str, ...], key: str, values: list[Any]) -> torch.Tensor:
    """One state of a handle as this rank's flat shard."""
    layout, axis = handle.layout, unit.options.groups.shard
    example = next(value for value in values if value is not None)
    shard = torch.zeros(layout.shard_numel, dtype=dtype_of(example), device=handle.flat_param.device)
    chunks: list[torch.Tensor | None] = [None] * len(values)
    for index, (slot, value) in enumerate(zip(layout.slots, values, strict=True)):
        if value is None:
            continue
        guise = handle.views.params[index].guise
        shape = guise.whole_shape(slot.shape)
        if shape_of(value) != shape:
            raise LoadError(
                f"State {key!r} of {fqns[index]!r} has shape {shape_of(value)}; expected {shape}, that of the "
                f"parameter, on rank {axis.rank}. Is it the state dict of another model?"
            )
        if isinstance(value, BoxedTensor):
            boxes_to_shard(value, layout, index, axis.rank, shard)
            continue
        if isinstance(value, FromRankZero):
            value = value.receive()
        chunks[index] = local_chunk(value)
        if chunks[index] is not None:
            refuse_split(unit, "The sharded optimizer state")
        else:
            piece = handle.views.pieces[index]
            shard[piece.in_shard.to_slice()].copy_(guise.part(value.detach()).reshape(-1)[piece.in_param.to_slice()])
    if any(chunk is not None for chunk in chunks):
        chunks_to_shard(layout, chunks, shard, axis)
    return shard
