"""Implements ``optim_state_dict``: saves optimizer states under parameter names, as full tensors or dim-0 chunks."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.comm import P2PChannels, barrier, digest_of, exchange_bytes, exchange_ints
from fsdp_flat.flat import PLAIN, FlatParamHandle
from fsdp_flat.runtime import ErrorTexts, agree
from fsdp_flat.state.boxed import boxed_value
from fsdp_flat.state.chunk_specs import ShardWithSpec, chunk_spec, chunks_of, plan_full_transfer
from fsdp_flat.state.common import rank_groups_of
from fsdp_flat.state.handle_states import HandleStates, Peers, agree_on_states, compare_states, read_states
from fsdp_flat.state.merge import dst_all, dst_rank_zero, dst_round_robin, merged_states
from fsdp_flat.state.optim_params import OptimContents, ParamNames, names_of
from fsdp_flat.state.owned import boxed_owned, chunked_owned, owned_entries, owners_by_slot, whole_owned
from fsdp_flat.state.param_groups import complete_groups, merged_params

__all__ = ["save_optim_state"]

_SAVING = ErrorTexts(
    "saving an optimizer's state", "Ranks save different optimizer states.", "Save the same on every rank."
)

# The tensor states, by handle and parameter.
_Values = dict[FlatParamHandle, list[dict[str, Any]]]


def save_optim_state(
    model: nn.Module,
    contents: OptimContents,
    *,
    whole: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    boxes: bool = False,
    peers: Peers | None = None,
) -> dict[str, Any]:
    """Return the state dict of an optimizer, keyed by names.

    Every rank must call this.

    Args:
        model: the model that the optimizer's parameters belong to.
        contents: the optimizer's contents.
        whole: return full tensors, else DTensors or ShardedTensors of dim-0 chunks.
        rank0_only: with ``whole``, ranks other than the first of all send their shards and return an empty dict.
        offload_to_cpu: return values on the CPU.
        boxes: without ``whole``, return boxes of this rank's states in place of chunks; then nothing is communicated,
            except with registered handlers, owned parameters or ``peers``.
        peers: with ``boxes``, for a checkpoint: ranks compare the names of their states through it, and each state that
            has a handler is returned on one rank only, as a full tensor, ranks in turn.

    Raises:
        OptionError: the optimizer holds a parameter that is not the model's.
        UnsupportedError: a state that is neither shaped like the rank's local shard nor a scalar, and has no handler.
        UsageError: a rank lacks a state of elements that it holds, while other ranks have it; or other ranks did not
            call this.
        PeerFailureError: another rank raised one of these.
    """
    names = names_of(model)
    boxes = boxes and not whole
    # Handlers are registered, and parameters owned, on every rank alike, so all ranks take the same branch.
    shared = bool(contents.owners) or any(unit.optim_state_handlers for unit in names.units)
    alone = boxes and (peers is not None or not shared)
    values: _Values = {}
    if peers is not None:
        groups, states, values = _compared_states(names, contents, peers, offload=offload_to_cpu)
    else:
        groups, states = _read_alone(names, contents) if alone else _agreed_states(names, contents)
    order = _order(names, contents, alone=alone)
    to_zero = whole and rank0_only
    keep = not to_zero or all(
        rank_group.rank == 0 for unit in names.units for rank_group in unit.options.groups.rank_groups
    )
    complete_groups(names, groups, alone=alone)
    with torch.no_grad():
        if boxes:
            values = values or _boxed_values(names, states, offload=offload_to_cpu)
        elif whole:
            values = _full_values(names, states, to_zero=to_zero, offload=offload_to_cpu)
        else:
            values = _chunked_values(names, states, offload=offload_to_cpu)
        dst_of = dst_rank_zero if to_zero else dst_round_robin if peers is not None else dst_all
        merged = merged_states(names, states, dst_of, offload=offload_to_cpu)
        owners = owners_by_slot(names, contents.owners)
        owned = list(owned_entries(names, {handle: states[handle].owned for handle in states}, owners))
        if boxes:
            rows = boxed_owned(owned, once=peers is not None, offload=offload_to_cpu)
        elif whole:
            rows = whole_owned(owned, to_zero=to_zero, offload=offload_to_cpu)
        else:
            rows = chunked_owned(owned, offload=offload_to_cpu)
        for (handle, index, name), value in (*merged.items(), *rows.items()):
            values[handle][index][name] = value
    if not keep:
        return {}
    by_name = _by_name(names, contents, states, values, offload=offload_to_cpu)
    placed = dict.fromkeys(fqn for fqn in order if fqn in by_name)
    placed.update(dict.fromkeys(sorted(by_name)))
    state = {"state": {name: by_name[name] for name in placed}}
    return state if groups is None else {**state, "param_groups": groups}


def _by_name(
    names: ParamNames,
    contents: OptimContents,
    states: dict[FlatParamHandle, HandleStates],
    values: _Values,
    *,
    offload: bool,
) -> dict[str, dict[str, Any]]:
    by_name: dict[str, dict[str, Any]] = {}
    for _, handle, fqns in names.handles:
        for index, has in enumerate(states[handle].params_with_state()):
            if has:
                row = {**states[handle].plain[index], **values[handle][index]}
                by_name[fqns[index]] = {key: row[key] for key in sorted(row)}
    held = set(contents.params)
    for param, name in names.others.items():
        if param in held and param in contents.state:
            by_name[name] = {key: _copied(value, offload) for key, value in contents.state[param].items()}
    return by_name


def _order(names: ParamNames, contents: OptimContents, *, alone: bool) -> list[str]:
    """Return names in the order of rank 0's optimizer, as in FSDP1; empty with original parameters, which are sorted.

    Every rank must call this, except with ``alone``.
    """
    units = names.units
    if all(unit.options.use_orig_params for unit in units):
        return []
    order = [fqn for param in contents.params for fqn in names.fqns_of(param)]
    for rank_group in [] if alone else rank_groups_of(units):
        assert rank_group.group is not None
        text, device = json.dumps(order).encode(), units[0].options.device
        if len({digest for (digest,) in exchange_ints([digest_of(text)], rank_group.group, device)}) > 1:
            order = json.loads(exchange_bytes(text, rank_group.group, device)[0])
    return order


def _read_alone(
    names: ParamNames, contents: OptimContents
) -> tuple[list[dict[str, Any]] | None, dict[FlatParamHandle, HandleStates]]:
    states = read_states(names, contents)
    if contents.state:
        _warn_of_gaps(names, states)
    return _groups(names, contents), states


def _warn_of_gaps(names: ParamNames, states: dict[FlatParamHandle, HandleStates]) -> None:
    """Warn of states that this rank lacks for elements that it holds; whether other ranks do is not checked."""
    found = [
        f"{fqn!r} of unit {unit.name!r}"
        for unit, handle, fqns in names.handles
        for fqn, local_shard, held, has in zip(
            fqns, handle.views.local_shards, states[handle].held, states[handle].params_with_state(), strict=True
        )
        if local_shard.numel and held and not has
    ]
    if found:
        warnings.warn(
            f"The optimizer of rank {dist.get_rank()} has states, but none of {', '.join(found[:6])}"
            f"{f' and {len(found) - 6} more' if len(found) > 6 else ''}, of which the rank holds elements. That is "
            "right for parameters that have had no gradient yet. With boxes=True ranks do not compare what they have: "
            "if another rank has these states, the checkpoint is incomplete.",
            stacklevel=5,
        )


def _compared_states(
    names: ParamNames, contents: OptimContents, peers: Peers, *, offload: bool
) -> tuple[list[dict[str, Any]] | None, dict[FlatParamHandle, HandleStates], _Values]:
    groups, states, error = _read_or_fail(names, contents)
    values: _Values = {}
    try:
        # Copied before ranks compare, since there may not be enough memory on one of them.
        values = {} if error else _boxed_values(names, states, offload=offload)
    except Exception as raised:
        error = raised
    held = [group["params"] for group in groups or ()]
    everyone = compare_states(names, states, held, error, peers)
    for group, params in zip(groups or (), merged_params(names, held, everyone), strict=True):
        group["params"] = params
    return groups, states, values


def _read_or_fail(
    names: ParamNames, contents: OptimContents
) -> tuple[list[dict[str, Any]] | None, dict[FlatParamHandle, HandleStates], Exception | None]:
    try:
        return _groups(names, contents), read_states(names, contents), None
    except Exception as error:
        return None, {}, error


def _agreed_states(
    names: ParamNames, contents: OptimContents
) -> tuple[list[dict[str, Any]] | None, dict[FlatParamHandle, HandleStates]]:
    units = names.units
    for rank_group in dict.fromkeys(unit.options.groups.shard for unit in units):
        barrier("optim_state_dict", rank_group)
    groups, states, error = _read_or_fail(names, contents)
    error = agree_on_states(names, states, error)
    if units:
        agree([], error, rank_groups_of(units), units[0].options.device, _SAVING)
    elif error is not None:
        raise error
    return groups, states


def _copied(value: Any, offload: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach().clone()
    return value.cpu() if offload or value.dim() == 0 else value


def _groups(names: ParamNames, contents: OptimContents) -> list[dict[str, Any]] | None:
    if contents.groups is None:
        return None
    groups = []
    for group in contents.groups:
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        fqns = [fqn for param in group["params"] for fqn in names.fqns_of(param)]
        groups.append({**settings, "params": fqns})
    return groups


def _empty_values(names: ParamNames) -> _Values:
    return {handle: [{} for _ in handle.layout.param_infos] for _, handle, _ in names.handles}


def _full_values(
    names: ParamNames, states: dict[FlatParamHandle, HandleStates], *, to_zero: bool, offload: bool
) -> _Values:
    """Send every local shard directly to its place in the full tensors, for all units and states at once."""
    values = _empty_values(names)
    channels = P2PChannels()
    for unit, handle, _ in names.handles:
        rank_group, device = unit.options.groups.shard, unit.options.device
        for index, param_info in enumerate(handle.layout.param_infos):
            transfer_plan = plan_full_transfer(handle, index, rank_group.rank, 0 if to_zero else None)
            for name, row in states[handle].local_shards.items():
                local_shard = row[index]
                if local_shard is not None:
                    target = (
                        None if to_zero and rank_group.rank else local_shard.new_empty(param_info.numel, device=device)
                    )
                    channels.add(
                        rank_group,
                        device,
                        transfer_plan,
                        local_shard,
                        target,
                        nbytes=param_info.numel * local_shard.itemsize,
                    )
                    values[handle][index][name] = target
    channels.wait()
    for _, handle, _ in names.handles:
        for index, found in enumerate(values[handle]):
            for name, target in found.items():
                if target is not None:
                    found[name] = _shaped(handle, index, target, offload)
    return values


def _shaped(handle: FlatParamHandle, index: int, flat: torch.Tensor, offload: bool) -> torch.Tensor:
    value = flat.view(handle.layout.param_infos[index].shape)
    adapter = handle.views.params[index].adapter
    if adapter is not PLAIN:
        value = adapter.full_tensor(adapter.from_local(value))
    return value.cpu() if offload else value


def _boxed_values(names: ParamNames, states: dict[FlatParamHandle, HandleStates], *, offload: bool) -> _Values:
    values = _empty_values(names)
    for _, handle, _ in names.handles:
        for name, row in states[handle].local_shards.items():
            for index, local_shard in enumerate(row):
                if local_shard is not None:
                    own = local_shard.to("cpu", copy=True) if offload else local_shard
                    values[handle][index][name] = boxed_value(handle, index, own)
    return values


def _chunked_values(names: ParamNames, states: dict[FlatParamHandle, HandleStates], *, offload: bool) -> _Values:
    values = _empty_values(names)
    places, rows = [], []
    for unit, handle, _ in names.handles:
        for index in range(len(handle.layout.param_infos)):
            local_shards = {name: row[index] for name, row in states[handle].local_shards.items()}
            spec = (
                chunk_spec(unit, handle, index)
                if any(local_shard is not None for local_shard in local_shards.values())
                else None
            )
            for name, local_shard in local_shards.items():
                if spec is not None and local_shard is not None:
                    places.append((handle, index, name))
                    rows.append(ShardWithSpec(spec, local_shard))
    for (handle, index, name), value in zip(places, chunks_of(rows, offload=offload), strict=True):
        values[handle][index][name] = value
    return values
