"""The states of one handle as pieces of its parameters and plain values, read off an optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_flat.comm import Axis, digest_of, dtype_named, exchange_bytes, exchange_ints
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.optim_state.handlers import refuse_split
from fsdp_flat.optim_state.names import OptimContents, ParamNames, is_elsewhere, is_scalar
from fsdp_flat.optim_state.plain_values import plain_from_text, plain_to_text
from fsdp_flat.runtime import Unit

__all__ = ["HandleStates", "agree_on_states", "read_states"]


@dataclass(slots=True)
class HandleStates:
    """The optimizer's states of one handle.

    Attributes:
        pieces: by name of a state that is shaped like the parameter, for each slot this rank's piece (1-D); None where
            there is no such state.
        handled: by slot, the states that a handler knows, as this rank has them; None where only others have it.
        plain: by slot, the states that are scalars or no tensors.
    """

    pieces: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    handled: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    plain: list[dict[str, Any]] = field(default_factory=list)

    def slots_with_state(self) -> list[bool]:
        """For each slot whether it has any state."""
        return [
            bool(values) or bool(self.handled[index]) or any(row[index] is not None for row in self.pieces.values())
            for index, values in enumerate(self.plain)
        ]


def read_states(names: ParamNames, contents: OptimContents) -> dict[FlatParamHandle, HandleStates]:
    """The states of every handle on this rank; pieces are views of what the optimizer holds.

    Raises:
        UnsupportedError: a state is neither a piece of its parameter nor a scalar, and has no handler.
    """
    found: dict[FlatParamHandle, HandleStates] = {}
    held = set(contents.params)
    for unit, handle, _ in names.handles:
        num = len(handle.layout.slots)
        states = HandleStates(handled=[{} for _ in range(num)], plain=[{} for _ in range(num)])
        for param in handle.views.visible_params():
            # States for no elements are never updated (a count of steps, for one): those of other ranks are right.
            if param in held and param in contents.state and not is_elsewhere(param, handle):
                _read(states, names, unit, handle, param, contents.state[param])
        found[handle] = states
    return found


def _read(
    states: HandleStates,
    names: ParamNames,
    unit: Unit,
    handle: FlatParamHandle,
    param: nn.Parameter,
    values: Mapping[str, Any],
) -> None:
    managed = names.managed[param]
    for name, value in values.items():
        if name in unit.optim_state_handlers:
            if len(managed.indices) > 1:
                raise UnsupportedError(
                    f"State {name!r} of unit {unit.name!r} has a handler, but belongs to a flat parameter of "
                    f"{len(managed.indices)} parameters, {managed.fqns[0]!r} the first. Pass use_orig_params=True."
                )
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"State {name!r} of {managed.fqns[0]!r} (unit {unit.name!r}) has a handler, which merges tensors; "
                    f"the optimizer keeps a {type(value).__name__} there. Register the handler for tensors only."
                )
            refuse_split(handle, managed.indices[0], name)
            states.handled[managed.indices[0]][name] = value
        elif is_scalar(value):
            for index in managed.indices:
                states.plain[index][name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        elif value.shape != param.shape:
            raise UnsupportedError(
                f"State {name!r} of {managed.fqns[0]!r} (unit {unit.name!r}) has shape {tuple(value.shape)} on rank "
                f"{handle.spec.rank} of the shard group; it is neither a scalar nor shaped like the rank's part of the "
                f"parameter, {tuple(param.shape)}. Say how it is put together by fsdp_flat.register_optim_state_handler"
                f"(model, {name!r}, merge=..., split=...)."
            )
        else:
            row = states.pieces.setdefault(name, [None] * len(handle.layout.slots))
            flat = value.detach().reshape(-1)
            for index in managed.indices:
                whole = param is handle.flat_param
                row[index] = flat[handle.views.pieces[index].in_shard.to_slice()] if whole else flat


def agree_on_states(names: ParamNames, states: dict[FlatParamHandle, HandleStates]) -> None:
    """Complete what a rank lacks (an optimizer may keep no state for an empty slice) from what others have.

    Every rank must call this. Normally all ranks have the same, and one integer is exchanged per group.

    Raises:
        OptionError: ranks hold different kinds of state.
    """
    for axis, members in _by_axis(names).items():
        for handle in members:
            _sort(states[handle])
        if axis.group is None or axis.size == 1:
            continue
        device = members[0].spec.device
        text = json.dumps([_describe(states[handle]) for handle in members])
        if len({row[0] for row in exchange_ints([digest_of(text.encode())], axis.group, device)}) == 1:
            continue
        for payload in exchange_bytes(text.encode(), axis.group, device):
            for handle, described in zip(members, json.loads(payload), strict=True):
                _complete(states[handle], described, handle)
                _sort(states[handle])


def _sort(states: HandleStates) -> None:
    """Every rank has to exchange in the same order, whatever order its optimizer made the states in."""
    states.pieces = {name: states.pieces[name] for name in sorted(states.pieces)}
    states.handled = [{name: row[name] for name in sorted(row)} for row in states.handled]


def _by_axis(names: ParamNames) -> dict[Axis, list[FlatParamHandle]]:
    found: dict[Axis, list[FlatParamHandle]] = {}
    for unit, handle, _ in names.handles:
        found.setdefault(unit.options.groups.shard, []).append(handle)
    return found


def _describe(states: HandleStates) -> dict[str, Any]:
    return {
        "pieces": {
            name: [None if piece is None else str(piece.dtype) for piece in row] for name, row in states.pieces.items()
        },
        "handled": [list(row) for row in states.handled],
        "plain": [{name: plain_to_text(value) for name, value in sorted(row.items())} for row in states.plain],
    }


def _complete(states: HandleStates, described: dict[str, Any], handle: FlatParamHandle) -> None:
    for name, row in described["pieces"].items():
        own = states.pieces.setdefault(name, [None] * len(row))
        for index, dtype_name in enumerate(row):
            piece = own[index]
            if dtype_name is not None and piece is None:
                numel = handle.views.pieces[index].numel
                own[index] = torch.zeros(numel, dtype=dtype_named(dtype_name), device=handle.flat_param.device)
            elif dtype_name is not None and piece is not None and str(piece.dtype) != dtype_name:
                raise OptionError(
                    f"State {name!r} of {handle.layout.slots[index].fqn!r} (unit {handle.spec.unit_name!r}) is "
                    f"{piece.dtype} on rank {handle.spec.rank} of the shard group and {dtype_name} on another."
                )
    for mine, others in zip(states.handled, described["handled"], strict=True):
        for name in others:
            mine.setdefault(name, None)
    for own_row, other in zip(states.plain, described["plain"], strict=True):
        for name, text in other.items():
            if name not in own_row:
                own_row[name] = plain_from_text(text)
