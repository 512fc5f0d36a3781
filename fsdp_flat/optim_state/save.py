"""``optim_state_dict``: an optimizer's state under parameter names, whole or in dim-0 chunks."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import nn

from fsdp_flat.comm import Lanes, digest_of, exchange_bytes, exchange_ints, meet
from fsdp_flat.flat import PLAIN, FlatParamHandle
from fsdp_flat.optim_state.groups import complete_groups
from fsdp_flat.optim_state.merge import everywhere, in_turn, merged_states, on_first
from fsdp_flat.optim_state.names import OptimContents, ParamNames, names_of
from fsdp_flat.optim_state.table import HandleStates, agree_on_states, read_states
from fsdp_flat.runtime import Words, agree
from fsdp_flat.state_dict import Row, axes_of, boxed_value, chunk_form, chunks_of, whole_moves

__all__ = ["save_optim_state"]

_SAVING = Words("saving an optimizer's state", "Ranks save different optimizer states.", "Save the same on every rank.")

# By handle and slot, the tensor states.
_Values = dict[FlatParamHandle, list[dict[str, Any]]]


def save_optim_state(
    model: nn.Module,
    contents: OptimContents,
    *,
    whole: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    boxes: bool = False,
    handled_once: bool = False,
) -> dict[str, Any]:
    """The state dict of an optimizer under names.

    Every rank must call this.

    Args:
        model: what the optimizer's parameters are found in.
        contents: the optimizer's.
        whole: whole tensors, else torch's types with dim-0 chunks.
        rank0_only: with ``whole``, ranks other than the first of all send what they have and return an empty dict.
        offload_to_cpu: values on the CPU.
        boxes: without ``whole``, boxes of this rank's states in place of chunks; nothing is communicated then, but for
            the states of handlers or with ``handled_once``.
        handled_once: states of handlers are whole on one rank each, in turn, and left out on the others. Ranks compare
            which states they have.

    Raises:
        OptionError: the optimizer holds a parameter that is none of the model's.
        UnsupportedError: a state that fits neither the rank's part of its parameter nor a scalar, and has no handler.
        UsageError: a rank lacks a state, which other ranks have, of elements that it holds; or other ranks did not
            call it.
        PeerFailureError: another rank found one of these.
    """
    names = names_of(model)
    boxes = boxes and not whole
    # A handler is registered on every rank, so all take the same way.
    alone = boxes and not handled_once and not any(unit.optim_state_handlers for unit, _, _ in names.handles)
    groups, states = _read_alone(names, contents) if alone else _agreed_states(names, contents)
    order = _order(names, contents, alone=alone)
    to_zero = whole and rank0_only
    keep = not to_zero or all(axis.rank == 0 for unit, _, _ in names.handles for axis in unit.options.groups.axes)
    complete_groups(names, groups, alone=alone)
    with torch.no_grad():
        if boxes:
            values = _boxed_values(names, states, offload=offload_to_cpu)
        elif whole:
            values = _whole_values(names, states, to_zero=to_zero, offload=offload_to_cpu)
        else:
            values = _chunked_values(names, states, offload=offload_to_cpu)
        dst_of = on_first if to_zero else in_turn if handled_once else everywhere
        for (handle, index, name), value in merged_states(names, states, dst_of, offload=offload_to_cpu).items():
            values[handle][index][name] = value
    if not keep:
        return {}
    by_name: dict[str, dict[str, Any]] = {}
    for _, handle, fqns in names.handles:
        for index, has in enumerate(states[handle].slots_with_state()):
            if has:
                row = {**states[handle].plain[index], **values[handle][index]}
                by_name[fqns[index]] = {key: row[key] for key in sorted(row)}
    for param, name in names.others.items():
        if param in contents.state:
            by_name[name] = {key: _copied(value, offload_to_cpu) for key, value in contents.state[param].items()}
    placed = dict.fromkeys(fqn for fqn in order if fqn in by_name)
    placed.update(dict.fromkeys(sorted(by_name)))
    state = {"state": {name: by_name[name] for name in placed}}
    return state if groups is None else {**state, "param_groups": groups}


def _order(names: ParamNames, contents: OptimContents, *, alone: bool) -> list[str]:
    """Names in FSDP1's order, the same on every rank: sorted with original parameters, else as rank 0's optimizer has.

    Every rank must call this, except ``alone``.
    """
    units = list(dict.fromkeys(unit for unit, _, _ in names.handles))
    if all(unit.options.use_orig_params for unit in units):
        return []
    order = [fqn for param in contents.params for fqn in names.fqns_of(param)]
    for axis in [] if alone else axes_of(units):
        assert axis.group is not None
        text, device = json.dumps(order).encode(), units[0].options.device
        if len({digest for (digest,) in exchange_ints([digest_of(text)], axis.group, device)}) > 1:
            order = json.loads(exchange_bytes(text, axis.group, device)[0])
    return order


def _read_alone(
    names: ParamNames, contents: OptimContents
) -> tuple[list[dict[str, Any]] | None, dict[FlatParamHandle, HandleStates]]:
    return _groups(names, contents), read_states(names, contents)


def _agreed_states(
    names: ParamNames, contents: OptimContents
) -> tuple[list[dict[str, Any]] | None, dict[FlatParamHandle, HandleStates]]:
    units = list(dict.fromkeys(unit for unit, _, _ in names.handles))
    for axis in dict.fromkeys(unit.options.groups.shard for unit in units):
        meet("optim_state_dict", axis)
    error: Exception | None = None
    groups: list[dict[str, Any]] | None = None
    states: dict[FlatParamHandle, HandleStates] = {}
    try:
        groups = _groups(names, contents)
        states = read_states(names, contents)
    except Exception as found:
        error = found
    error = agree_on_states(names, states, error)
    if units:
        agree([], error, axes_of(units), units[0].options.device, _SAVING)
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
    return {handle: [{} for _ in handle.layout.slots] for _, handle, _ in names.handles}


def _whole_values(
    names: ParamNames, states: dict[FlatParamHandle, HandleStates], *, to_zero: bool, offload: bool
) -> _Values:
    """Every piece goes straight to its place in the whole tensors, of all units and states at once."""
    values = _empty_values(names)
    lanes = Lanes()
    for unit, handle, _ in names.handles:
        axis, device = unit.options.groups.shard, unit.options.device
        for index, slot in enumerate(handle.layout.slots):
            moves = whole_moves(handle, index, axis.rank, 0 if to_zero else None)
            for name, row in states[handle].pieces.items():
                piece = row[index]
                if piece is not None:
                    target = None if to_zero and axis.rank else piece.new_empty(slot.numel, device=device)
                    lanes.add(axis, device, moves, piece, target, nbytes=slot.numel * piece.itemsize)
                    values[handle][index][name] = target
    lanes.wait()
    for _, handle, _ in names.handles:
        for index, found in enumerate(values[handle]):
            for name, target in found.items():
                if target is not None:
                    found[name] = _shaped(handle, index, target, offload)
    return values


def _shaped(handle: FlatParamHandle, index: int, flat: torch.Tensor, offload: bool) -> torch.Tensor:
    value = flat.view(handle.layout.slots[index].shape)
    guise = handle.views.params[index].guise
    if guise is not PLAIN:
        value = guise.whole(guise.shown(value))
    return value.cpu() if offload else value


def _boxed_values(names: ParamNames, states: dict[FlatParamHandle, HandleStates], *, offload: bool) -> _Values:
    values = _empty_values(names)
    for _, handle, _ in names.handles:
        for name, row in states[handle].pieces.items():
            for index, piece in enumerate(row):
                if piece is not None:
                    own = piece.to("cpu", copy=True) if offload else piece
                    values[handle][index][name] = boxed_value(handle, index, own)
    return values


def _chunked_values(names: ParamNames, states: dict[FlatParamHandle, HandleStates], *, offload: bool) -> _Values:
    values = _empty_values(names)
    places, rows = [], []
    for unit, handle, _ in names.handles:
        for index in range(len(handle.layout.slots)):
            pieces = {name: row[index] for name, row in states[handle].pieces.items()}
            form = chunk_form(unit, handle, index) if any(piece is not None for piece in pieces.values()) else None
            for name, piece in pieces.items():
                if form is not None and piece is not None:
                    places.append((handle, index, name))
                    rows.append(Row(form, piece))
    for (handle, index, name), value in zip(places, chunks_of(rows, offload=offload), strict=True):
        values[handle][index][name] = value
    return values
