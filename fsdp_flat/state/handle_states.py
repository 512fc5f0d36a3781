"""Reads the optimizer states of each handle as local shards and non-tensor values, and completes them across ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.comm import RankGroup, digest_of, dtype_from_name, exchange_bytes, exchange_ints
from fsdp_flat.errors import FsdpFlatError, OptionError, UnsupportedError, UsageError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.runtime import Unit
from fsdp_flat.state.common import rank_groups_of
from fsdp_flat.state.handlers import refuse_split
from fsdp_flat.state.non_tensor_values import value_from_text, value_to_text
from fsdp_flat.state.optim_params import OptimContents, ParamNames, is_on_other_ranks, is_scalar
from fsdp_flat.state.owned import OwnedState, owned_tensors, owners_by_slot

__all__ = ["HandleStates", "Peers", "agree_on_states", "compare_states", "read_states"]

# A unit, one of its handles, and the names of the handle's parameters.
_Member = tuple[Unit, FlatParamHandle, tuple[str, ...]]


@dataclass(slots=True)
class HandleStates:
    """Holds the optimizer states of one handle.

    Attributes:
        local_shards: by name of a state shaped like its parameter, this rank's local shard of it (1-D) for each
            parameter; None if there is no such state.
        custom_handled: by parameter, the states that have a handler; None for a state that only other ranks have.
        plain: by parameter, the states that are scalars or not tensors.
        held: by parameter, whether this rank's optimizer holds the parameter.
        owned: by parameter that one rank owns, its states by name.
    """

    local_shards: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    custom_handled: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    plain: list[dict[str, Any]] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    owned: dict[int, dict[str, OwnedState]] = field(default_factory=dict)

    def params_with_state(self) -> list[bool]:
        """Return for each parameter whether it has any state."""
        return [
            bool(values)
            or bool(self.custom_handled[index])
            or bool(self.owned.get(index))
            or any(row[index] is not None for row in self.local_shards.values())
            for index, values in enumerate(self.plain)
        ]


def read_states(names: ParamNames, contents: OptimContents) -> dict[FlatParamHandle, HandleStates]:
    """Read this rank's states of every handle; local shards are views of the optimizer's tensors.

    Raises:
        UnsupportedError: a state is neither a local shard of its parameter nor a scalar, and has no handler.
    """
    found: dict[FlatParamHandle, HandleStates] = {}
    held = set(contents.params)
    owners = owners_by_slot(names, contents.owners)
    for unit, handle, _ in names.handles:
        num = len(handle.layout.param_infos)
        states = HandleStates(
            custom_handled=[{} for _ in range(num)], plain=[{} for _ in range(num)], held=[False] * num
        )
        states.owned = {index: {} for index in range(num) if (handle, index) in owners}
        for param in handle.views.visible_params():
            for index in names.managed[param].indices:
                states.held[index] = param in held
            if param in contents.owners:
                if contents.owners[param] == handle.spec.rank and param in contents.state:
                    _read_owned(states, names, param, contents.state[param])
                continue
            # States of empty local shards are never updated (a step count, for one): use those of other ranks.
            if param in held and param in contents.state and not is_on_other_ranks(param, handle):
                _read(states, names, unit, handle, param, contents.state[param])
        found[handle] = states
    return found


def _read_owned(states: HandleStates, names: ParamNames, param: nn.Parameter, values: Mapping[str, Any]) -> None:
    managed = names.managed[param]
    (index,) = managed.indices
    states.owned[index] = owned_tensors(f"{managed.fqns[0]!r} (unit {managed.unit.name!r})", values)
    for name, value in values.items():
        if name not in states.owned[index]:
            states.plain[index][name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


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
            states.custom_handled[managed.indices[0]][name] = value
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
            row = states.local_shards.setdefault(name, [None] * len(handle.layout.param_infos))
            flat = value.detach().reshape(-1)
            for index in managed.indices:
                whole = param is handle.flat_param
                row[index] = flat[handle.views.local_shards[index].in_shard.to_slice()] if whole else flat


def agree_on_states(
    names: ParamNames, states: Mapping[FlatParamHandle, HandleStates], error: Exception | None
) -> Exception | None:
    """Complete the states of empty local shards, for which an optimizer may keep none, from those of other ranks.

    Every rank must call this, even one that could not read its states. Normally all ranks have the same states, and
    two integers are exchanged per group.

    Args:
        names: the model's names.
        states: by handle, from :func:`read_states`.
        error: the exception that stopped this rank before, or None.

    Returns:
        ``error``; else a UsageError if a rank lacks a state of elements that it holds, or an OptionError if a state
        has several dtypes; else None. Ranks of different groups may return different errors: agree on them next.
    """
    for rank_group, members in _by_rank_group(names).items():
        assert rank_group.group is not None
        device = members[0][1].spec.device
        text = "" if error else json.dumps([_describe(states[handle]) for _, handle, _ in members])
        rows = exchange_ints([int(error is None), digest_of(text.encode())], rank_group.group, device)
        if not all(is_well for is_well, _ in rows) or len({digest for _, digest in rows}) == 1:
            continue
        numels = [_numels_with_state(handle, states[handle]) for _, handle, _ in members]
        payloads = exchange_bytes(json.dumps([json.loads(text), numels]).encode(), rank_group.group, device)
        everyone = [json.loads(payload) for payload in payloads]
        try:
            _complete_all(members, states, dist.get_process_group_ranks(rank_group.group), everyone)
        except FsdpFlatError as found:
            error = found
    for found_states in states.values():
        _sort(found_states)
    return error


class Peers(Protocol):
    """Exchanges values with all ranks of a model.

    Attributes:
        ranks: their global ranks.
    """

    ranks: list[int]

    def integers(self, values: list[int], error: Exception | None) -> list[list[int]]:
        """All-gather integers, as many on every rank, in one collective; raise on all ranks if one has an error."""

    def texts(self, text: str) -> list[str]:
        """All-gather texts."""


def compare_states(
    names: ParamNames,
    states: Mapping[FlatParamHandle, HandleStates],
    held: list[list[str]],
    error: Exception | None,
    peers: Peers,
) -> list[list[list[str]]]:
    """Compare the states of all ranks in one collective of an integer a parameter.

    A rank describes the parameters of which it has elements. Where descriptions differ, and with handlers and owned
    parameters, for which every rank needs to know all states, a second exchange names the difference or completes the
    states.

    Args:
        names: the model's names.
        states: by handle, from :func:`read_states`.
        held: by parameter group, the names of the parameters that this rank's optimizer holds.
        error: the exception that stopped this rank before, or None.
        peers: every rank of the model must call this.

    Returns:
        ``held`` of every rank.

    Raises:
        UsageError: a rank lacks a state of elements that it holds.
        OptionError: a state has several dtypes.
    """
    digests = [
        digest if error is None else 0
        for _, handle, _ in names.handles
        for digest in (_digests(handle, states[handle]) if error is None else [0] * len(handle.layout.param_infos))
    ]
    rows = peers.integers([digest_of(json.dumps(held).encode()), *digests], error)
    needs_all = any(unit.optim_state_handlers for unit in names.units) or any(each.owned for each in states.values())
    alike = len({row[0] for row in rows}) == 1 and all(len({*column} - {0}) <= 1 for column in zip(*rows, strict=True))
    everyone = [held] * len(rows)
    if needs_all or not alike:
        own = [_describe(states[handle]) for _, handle, _ in names.handles]
        numels = [_numels_with_state(handle, states[handle]) for _, handle, _ in names.handles]
        described = [json.loads(text) for text in peers.texts(json.dumps([own, numels, held]))]
        _complete_all(names.handles, states, peers.ranks, [each[:2] for each in described])
        everyone = [each[2] for each in described]
    for found_states in states.values():
        _sort(found_states)
    return everyone


def _digests(handle: FlatParamHandle, states: HandleStates) -> list[int]:
    """Return for each parameter a digest of the names and dtypes of its states; 0 if this rank has no elements."""
    found = []
    for index, numel in enumerate(_numels_with_state(handle, states)):
        shards = {
            name: str(shard.dtype) for name, row in states.local_shards.items() if (shard := row[index]) is not None
        }
        others = [sorted(states.plain[index]), sorted(states.custom_handled[index]), states.held[index]]
        text = json.dumps([shards, *others], sort_keys=True)
        found.append(digest_of(text.encode()) if numel else 0)
    return found


def _complete_all(
    members: Sequence[_Member],
    states: Mapping[FlatParamHandle, HandleStates],
    ranks: Sequence[int],
    everyone: Sequence[Any],
) -> None:
    """Complete the states from the descriptions of all ranks, each a pair of descriptions and numbers of elements."""
    lacking = _lacking(ranks, members, everyone)
    if lacking:
        raise _incomplete(lacking)
    for (_, handle, _), *described in zip(members, *(rows for rows, _ in everyone), strict=True):
        for each in described:
            _complete(states[handle], each, handle)


def _numels_with_state(handle: FlatParamHandle, states: HandleStates) -> list[int]:
    """For each parameter how many of its elements this rank's optimizer keeps states for."""
    # Of an owned parameter the owner has all states: no other rank lacks any.
    return [
        0 if index in states.owned else local_shard.numel for index, local_shard in enumerate(handle.views.local_shards)
    ]


def _lacking(
    ranks: Sequence[int], members: Sequence[_Member], everyone: Sequence[tuple[list[Any], list[list[int]]]]
) -> dict[tuple[int, str], list[str]]:
    """Return by rank and state names the parameters of which the rank has elements but lacks these states."""
    held = [[_kept_names(row) for row in described] for described, _ in everyone]
    found: dict[tuple[int, str], list[str]] = {}
    for at, (unit, _, fqns) in enumerate(members):
        for index, fqn in enumerate(fqns):
            anywhere = set().union(*(of_rank[at][index] for of_rank in held))
            for rank, of_rank, (_, numels) in zip(ranks, held, everyone, strict=True):
                missing = anywhere - of_rank[at][index]
                if missing and numels[at][index]:
                    where = found.setdefault((rank, ", ".join(sorted(missing))), [])
                    where.append(f"{fqn!r} of unit {unit.name!r}")
    return found


def _kept_names(described: dict[str, Any]) -> list[set[str]]:
    """Return for each parameter the names of all states that a rank's optimizer has."""
    found = []
    for index, (plain, custom_handled, held) in enumerate(
        zip(described["plain"], described["handled"], described["held"], strict=True)
    ):
        local_shards = (name for name, dtypes in described["pieces"].items() if dtypes[index] is not None)
        found.append({*plain, *custom_handled, *local_shards, *(["a place in a parameter group"] if held else [])})
    return found


def _incomplete(lacking: Mapping[tuple[int, str], list[str]]) -> UsageError:
    told = "; ".join(
        f"rank {rank} lacks {states} of {', '.join(params[:12])}"
        + (f" and {len(params) - 12} more" if len(params) > 12 else "")
        for (rank, states), params in lacking.items()
    )
    return UsageError(
        f"Optimizer states that other ranks have are missing, so nothing was saved: {told}. A rank may lack the states "
        "of parameters that it has no elements of, and no others: build the optimizer from the same parameters on "
        "every rank, and step it on every rank or on none."
    )


def _sort(states: HandleStates) -> None:
    """Sort states by name, so that every rank exchanges them in the same order."""
    states.local_shards = {name: states.local_shards[name] for name in sorted(states.local_shards)}
    states.custom_handled = [{name: row[name] for name in sorted(row)} for row in states.custom_handled]


def _by_rank_group(names: ParamNames) -> dict[RankGroup, list[_Member]]:
    """Return the handles by process group; the ranks of a group must have the same states of them."""
    found: dict[RankGroup, list[_Member]] = {}
    for member in names.handles:
        for rank_group in rank_groups_of([member[0]]):
            found.setdefault(rank_group, []).append(member)
    return found


def _describe(states: HandleStates) -> dict[str, Any]:
    return {
        "pieces": {
            name: [None if local_shard is None else str(local_shard.dtype) for local_shard in row]
            for name, row in states.local_shards.items()
        },
        "held": states.held,
        "owned": [
            [index, name, state.shape, str(state.dtype)]
            for index, row in states.owned.items()
            for name, state in row.items()
        ],
        "handled": [list(row) for row in states.custom_handled],
        "plain": [{name: value_to_text(value) for name, value in sorted(row.items())} for row in states.plain],
    }


def _complete(states: HandleStates, described: dict[str, Any], handle: FlatParamHandle) -> None:
    for name, row in described["pieces"].items():
        own = states.local_shards.setdefault(name, [None] * len(row))
        for index, dtype_name in enumerate(row):
            local_shard = own[index]
            if dtype_name is not None and local_shard is None:
                numel = handle.views.local_shards[index].numel
                own[index] = torch.zeros(numel, dtype=dtype_from_name(dtype_name), device=handle.flat_param.device)
            elif dtype_name is not None and local_shard is not None and str(local_shard.dtype) != dtype_name:
                raise OptionError(
                    f"State {name!r} of {handle.layout.param_infos[index].fqn!r} (unit {handle.spec.unit_name!r}) is "
                    f"{local_shard.dtype} on rank {handle.spec.rank} of the shard group and {dtype_name} on another."
                )
    for mine, others in zip(states.custom_handled, described["handled"], strict=True):
        for name in others:
            mine.setdefault(name, None)
    for index, name, shape, dtype_name in described["owned"]:
        states.owned[index].setdefault(name, OwnedState(None, tuple(shape), dtype_from_name(dtype_name)))
    for own_row, other in zip(states.plain, described["plain"], strict=True):
        for name, text in other.items():
            if name not in own_row:
                own_row[name] = value_from_text(text)
