"""The states of one handle as flat shards and plain values, read off an optimizer or written for one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_flat.comm import UnitGroups, exchange_bytes, exchange_ints
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.optim_state.names import OptimContents, ParamNames, is_scalar

__all__ = ["HandleStates", "agree_on_states", "read_states"]


@dataclass(slots=True)
class HandleStates:
    """The optimizer's states of one handle.

    Attributes:
        shards: by state name a flat shard (1-D, ``shard_numel``), zero where a slot has no such state.
        has: by state name, for each slot whether it has that state as a shard.
        plain: by slot, the states that are scalars or no tensors.
    """

    shards: dict[str, torch.Tensor] = field(default_factory=dict)
    has: dict[str, list[bool]] = field(default_factory=dict)
    plain: list[dict[str, Any]] = field(default_factory=list)

    def slots_with_state(self) -> list[bool]:
        """For each slot whether it has any state."""
        return [bool(values) or any(row[i] for row in self.has.values()) for i, values in enumerate(self.plain)]


def read_states(names: ParamNames, contents: OptimContents) -> dict[FlatParamHandle, HandleStates]:
    """The states of every handle on this rank.

    Raises:
        UnsupportedError: a state fits neither the shard nor a scalar.
    """
    found: dict[FlatParamHandle, HandleStates] = {}
    held = set(contents.params)
    for unit, handle, _ in names.handles:
        states = HandleStates(plain=[{} for _ in handle.layout.slots])
        for param in handle.views.visible_params():
            if param in held and param in contents.state:
                _read(states, names, handle, param, contents.state[param], unit.name)
        found[handle] = states
    return found


def _read(
    states: HandleStates,
    names: ParamNames,
    handle: FlatParamHandle,
    param: nn.Parameter,
    values: Mapping[str, Any],
    unit_name: str,
) -> None:
    managed = names.managed[param]
    for name, value in values.items():
        if is_scalar(value):
            for index in managed.indices:
                states.plain[index][name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            continue
        if value.shape != param.shape:
            raise UnsupportedError(
                f"State {name!r} of {managed.fqns[0]!r} (unit {unit_name!r}) has shape {tuple(value.shape)}; it is "
                f"neither a scalar nor shaped like the rank's part of the parameter, {tuple(param.shape)}, so it is "
                "not known how to put it together."
            )
        shard = states.shards.get(name)
        if shard is None:
            shard = torch.zeros(handle.layout.shard_numel, dtype=value.dtype, device=value.device)
            states.shards[name] = shard
            states.has[name] = [False] * len(handle.layout.slots)
        for index in managed.indices:
            states.has[name][index] = True
        if param is handle.flat_param:
            shard.copy_(value)
        else:
            piece = handle.views.pieces[managed.indices[0]]
            shard[piece.in_shard.to_slice()].copy_(value.reshape(-1))


def agree_on_states(
    names: ParamNames, states: dict[FlatParamHandle, HandleStates]
) -> dict[FlatParamHandle, HandleStates]:
    """Complete what a rank lacks (an optimizer may keep no state for an empty slice) from what others have.

    Every rank must call this. Normally all ranks have the same and one integer is exchanged per group.

    Raises:
        OptionError: ranks hold different kinds of state.
    """
    for groups, members in _by_groups(names).items():
        group = groups.shard.group
        if group is None or groups.shard.size == 1:
            continue
        device = members[0].spec.device
        text = json.dumps([_describe(states[handle]) for handle in members])
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        if len({row[0] for row in exchange_ints([digest], group, device)}) == 1:
            continue
        for payload in exchange_bytes(text.encode(), group, device):
            for handle, described in zip(members, json.loads(payload), strict=True):
                _complete(states[handle], described, handle)
    return states


def _by_groups(names: ParamNames) -> dict[UnitGroups, list[FlatParamHandle]]:
    found: dict[UnitGroups, list[FlatParamHandle]] = {}
    for unit, handle, _ in names.handles:
        found.setdefault(unit.options.groups, []).append(handle)
    return found


def _describe(states: HandleStates) -> dict[str, Any]:
    return {
        "has": {name: states.has[name] for name in sorted(states.has)},
        "dtypes": {name: str(states.shards[name].dtype) for name in sorted(states.shards)},
        "plain": [
            {
                name: [str(value.dtype), value.item()] if isinstance(value, torch.Tensor) else ["", value]
                for name, value in sorted(row.items())
                if isinstance(value, (torch.Tensor, int, float, str, bool, type(None)))
            }
            for row in states.plain
        ],
    }


def _complete(states: HandleStates, described: dict[str, Any], handle: FlatParamHandle) -> None:
    for name, row in described["has"].items():
        dtype = getattr(torch, described["dtypes"][name].removeprefix("torch."))
        shard = states.shards.get(name)
        if shard is None:
            states.shards[name] = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.flat_param.device)
            states.has[name] = list(row)
        elif shard.dtype != dtype:
            raise OptionError(
                f"State {name!r} of unit {handle.spec.unit_name!r} is {shard.dtype} here and {dtype} elsewhere."
            )
        else:
            states.has[name] = [a or b for a, b in zip(states.has[name], row, strict=True)]
    for own, other in zip(states.plain, described["plain"], strict=True):
        for name, (dtype_name, value) in other.items():
            if name not in own:
                own[name] = (
                    torch.tensor(value, dtype=getattr(torch, dtype_name.removeprefix("torch.")))
                    if dtype_name
                    else value
                )
    # Every rank has to gather in the same order.
    states.shards = {name: states.shards[name] for name in sorted(states.shards)}
