"""Reads an optimizer's states of each parameter as shards and non-tensor values, and completes them across ranks.

An optimizer that computes with unsharded parameters (``fsdp_flat.MatrixOptimizer``) lists their owners in
``state_owners``: one rank of the shard group has the full states of such a parameter, of any shape, and the others
have none. To a codec that is one more partition.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.comm import digest_of, dtype_from_name, exchange_if_different, exchange_ints
from fsdp_flat.errors import FsdpFlatError, OptionError, UnsupportedError, UsageError, some_of
from fsdp_flat.state._torch import is_scalar
from fsdp_flat.state.handlers import refuse_split
from fsdp_flat.state.optim_contents import OptimContents, copied_state
from fsdp_flat.state.param_index import IndexedParam, ParamIndex, rank_groups_of
from fsdp_flat.state.shards import StateShard


@dataclass(slots=True)
class ParamState:
    """Holds the optimizer states of one parameter.

    Attributes:
        param: the parameter.
        owner: the rank of the shard group that has all its states; None if every rank has its own part.
        is_held: this rank's optimizer holds the parameter.
        tensors: by name, the states that are tensors of several elements.
        custom_handled: by name, the states that have a handler; None for a state that only other ranks have.
        plain: by name, the states that are scalars or not tensors.
    """

    param: IndexedParam
    owner: int | None
    is_held: bool = False
    tensors: dict[str, StateShard] = field(default_factory=dict)
    custom_handled: dict[str, torch.Tensor | None] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Names of all states."""
        return {*self.tensors, *self.custom_handled, *self.plain}

    @property
    def own_numel(self) -> int:
        """Number of elements for which this rank must have states; 0 if one rank owns the parameter."""
        # Of an owned parameter the owner has all states: no other rank lacks any.
        return 0 if self.owner is not None else self.param.local_shard.numel

    def put(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Set a tensor state; without ``tensor`` this rank's elements, if it has any, are zeros.

        Args:
            name: name of the state.
            tensor: this rank's elements, 1-D; all of them on the owner.
            dtype: dtype of the state.
            shape: shape of the state of an owned parameter; others have the parameter's.
        """
        if tensor is None:
            numel = self.param.local_shard.numel if self.owner is None else 0
            tensor = torch.zeros(numel, dtype=dtype, device=self.param.handle.flat_param.device)
        self.tensors[name] = StateShard.of_state(self.param, tensor, name, shape, self.owner)


def read_states(index: ParamIndex, contents: OptimContents) -> list[ParamState]:
    """Read this rank's states of every parameter; shards are views of the optimizer's tensors.

    Raises:
        UnsupportedError: a state is neither a local shard of its parameter nor a scalar, and has no handler.
    """
    found: dict[IndexedParam, ParamState] = {}
    held = set(contents.params)
    for visible, params in index.managed.items():
        owner = contents.owners.get(visible)
        states = [ParamState(param, owner, visible in held) for param in params]
        found.update(zip(params, states, strict=True))
        if owner is not None:
            if owner == params[0].rank_group.rank and visible in contents.state:
                _read_owned(states[0], contents.state[visible])
        # States of empty local shards are never updated (a step count, for one): use those of other ranks.
        elif visible in held and visible in contents.state and not params[0].is_on_other_ranks:
            _read(states, visible, contents.state[visible])
    return [found[param] for param in index.params]


def _read_owned(state: ParamState, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not is_scalar(value):
            state.put(name, value.detach().reshape(-1), value.dtype, value.shape)
        elif _holds_tensors(value):
            raise UnsupportedError(
                f"State {name!r} of {state.param.fqn!r} (unit {state.param.unit.name!r}) is a {type(value).__name__} "
                "of tensors; state dicts hold tensors, numbers and other plain values. Save the optimizer's own "
                "state_dict() rank by rank, which fits the same number of ranks only, or use an optimizer that keeps "
                "each tensor under a name."
            )
        else:
            state.plain[name] = copied_state(value, "cpu")


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return any(isinstance(entry, torch.Tensor) or _holds_tensors(entry) for entry in value)


def _read(states: Sequence[ParamState], visible: nn.Parameter, values: Mapping[str, Any]) -> None:
    """Read the states of a parameter of the optimizer, which may hold several parameters of the model."""
    first = states[0].param
    where = f"{first.fqn!r} (unit {first.unit.name!r})"
    for name, value in values.items():
        if name in first.unit.optim_state_handlers:
            if len(states) > 1:
                raise UnsupportedError(
                    f"State {name!r} of unit {first.unit.name!r} has a handler, but belongs to a flat parameter of "
                    f"{len(states)} parameters, {first.fqn!r} the first. Pass use_orig_params=True."
                )
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"State {name!r} of {where} has a handler, which merges tensors; the optimizer keeps a "
                    f"{type(value).__name__} there. Register the handler for tensors only."
                )
            refuse_split(first, name)
            states[0].custom_handled[name] = value
        elif is_scalar(value):
            for state in states:
                state.plain[name] = copied_state(value, "cpu")
        elif value.shape != visible.shape:
            raise UnsupportedError(
                f"State {name!r} of {where} has shape {tuple(value.shape)} on rank {first.rank_group.rank} of the "
                "shard group; it is neither a scalar nor shaped like the rank's part of the parameter, "
                f"{tuple(visible.shape)}. Say how it is put together by fsdp_flat.register_optim_state_handler"
                f"(model, {name!r}, merge=..., split=...)."
            )
        else:
            flat = value.detach().reshape(-1)
            for state in states:
                param = state.param
                own = flat if param.is_original else flat[param.local_shard.in_shard.to_slice()]
                state.put(name, own, value.dtype, ())


def agree_on_states(index: ParamIndex, states: Sequence[ParamState], error: Exception | None) -> Exception | None:
    """Complete the states of empty local shards, for which an optimizer may keep none, from those of other ranks.

    Every rank must call this, even one that could not read its states. Normally all ranks have the same states, and
    one integer is exchanged per group.

    Args:
        index: the model's parameters.
        states: the result of :func:`read_states`; empty after an error.
        error: the exception that stopped this rank before, or None.

    Returns:
        ``error``; else a UsageError if a rank lacks a state of elements that it holds, or an OptionError if a state
        has several dtypes; else None. Ranks of different groups may return different errors: agree on them next.
    """
    groups = {unit: rank_groups_of([unit]) for unit in index.units}
    for rank_group in index.rank_groups:
        own = [state for state in states if rank_group in groups[state.param.unit]] if error is None else []
        payload = b"" if error else json.dumps([_describe(state) for state in own]).encode()
        payloads = exchange_if_different(payload, rank_group, index.device)
        if payloads is None or not all(payloads):
            continue
        everyone = [json.loads(each) for each in payloads]
        try:
            assert rank_group.group is not None
            numels = exchange_ints([state.own_numel for state in own], rank_group.group, index.device)
            _complete_all(own, dist.get_process_group_ranks(rank_group.group), everyone, numels)
        except FsdpFlatError as found:
            error = found
    _sort(states)
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
    index: ParamIndex,
    states: Sequence[ParamState],
    held: list[list[str]],
    error: Exception | None,
    peers: Peers,
) -> list[list[list[str]]]:
    """Compare the states of all ranks in one collective of an integer a parameter.

    A rank describes the parameters of which it has elements. Where descriptions differ, and with handlers and owned
    parameters, for which every rank needs to know all states, a second exchange names the difference or completes the
    states.

    Args:
        index: the model's parameters.
        states: the result of :func:`read_states`; empty after an error.
        held: by parameter group, the names of the parameters that this rank's optimizer holds.
        error: the exception that stopped this rank before, or None.
        peers: every rank of the model must call this.

    Returns:
        ``held`` of every rank.

    Raises:
        UsageError: a rank lacks a state of elements that it holds.
        OptionError: a state has several dtypes.
    """
    digests = [0] * len(index.params) if error is not None else [_digest(state) for state in states]
    rows = peers.integers([digest_of(json.dumps(held).encode()), *digests], error)
    needs_all = any(unit.optim_state_handlers for unit in index.units) or any(s.owner is not None for s in states)
    alike = len({row[0] for row in rows}) == 1 and all(len({*column} - {0}) <= 1 for column in zip(*rows, strict=True))
    everyone = [held] * len(rows)
    if needs_all or not alike:
        own = [[_describe(state) for state in states], [state.own_numel for state in states], held]
        found = [json.loads(text) for text in peers.texts(json.dumps(own))]
        _complete_all(states, peers.ranks, [each[0] for each in found], [each[1] for each in found])
        everyone = [each[2] for each in found]
    _sort(states)
    return everyone


def _digest(state: ParamState) -> int:
    """Return a digest of the names and dtypes of a parameter's states; 0 if this rank has no elements of it."""
    dtypes = {name: str(shard.local.dtype) for name, shard in state.tensors.items()}
    text = json.dumps([dtypes, sorted(state.custom_handled), sorted(state.plain), state.is_held], sort_keys=True)
    return digest_of(text.encode()) if state.own_numel else 0


def _complete_all(
    states: Sequence[ParamState], ranks: Sequence[int], everyone: Sequence[Any], numels: Sequence[Sequence[int]]
) -> None:
    """Complete the states from the descriptions of all ranks, which have ``numels`` elements of each parameter."""
    _check_lacking(ranks, states, everyone, numels)
    for at, state in enumerate(states):
        for described in everyone:
            _complete(state, *described[at])


def _sort(states: Sequence[ParamState]) -> None:
    for state in states:
        # Every rank exchanges states in the same order.
        state.tensors = {name: state.tensors[name] for name in sorted(state.tensors)}
        state.custom_handled = {name: state.custom_handled[name] for name in sorted(state.custom_handled)}


def _describe(state: ParamState) -> list[Any]:
    """Describe the states of a parameter as JSON, equal on every rank that has the same states."""
    tensors = {
        name: [str(shard.local.dtype), [] if state.owner is None else shard.shape]
        for name, shard in sorted(state.tensors.items())
    }
    plain = {name: _to_json(value) for name, value in sorted(state.plain.items())}
    return [tensors, sorted(state.custom_handled), plain, state.is_held]


def _to_json(value: Any) -> list[Any]:
    """Encode a non-tensor state, equal on every rank for equal values; pickled if JSON lacks the type."""
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return [str(value.dtype), value.item()]
    if type(value) in (int, float, str, bool, type(None)):
        return ["", value]
    return ["pickle", base64.b64encode(pickle.dumps(value)).decode()]


def _from_json(kind: str, value: Any) -> Any:
    """Decode a value that :func:`_to_json` encoded on a rank of the same job."""
    if kind == "pickle":
        return pickle.loads(base64.b64decode(value))
    return torch.tensor(value, dtype=dtype_from_name(kind)) if kind else value


def _complete(
    state: ParamState, tensors: dict[str, Any], custom_handled: list[str], plain: dict[str, Any], _is_held: bool
) -> None:
    """Add the states that another rank has."""
    for name, (dtype_name, shape) in tensors.items():
        if name not in state.tensors:
            state.put(name, None, dtype_from_name(dtype_name), shape)
        elif str(state.tensors[name].local.dtype) != dtype_name:
            raise OptionError(
                f"State {name!r} of {state.param.fqn!r} (unit {state.param.unit.name!r}) is "
                f"{state.tensors[name].local.dtype} on rank {state.param.rank_group.rank} of the shard group and "
                f"{dtype_name} on another."
            )
    for name in custom_handled:
        state.custom_handled.setdefault(name, None)
    for name, encoded in plain.items():
        if name not in state.plain:
            state.plain[name] = _from_json(*encoded)


def _check_lacking(
    ranks: Sequence[int], states: Sequence[ParamState], everyone: Sequence[Any], numels: Sequence[Sequence[int]]
) -> None:
    """Raise if a rank lacks a state of elements that it holds.

    Raises:
        UsageError: one does; the text lists the parameters by rank and states.
    """
    lacking: dict[tuple[int, str], list[str]] = {}
    for at, state in enumerate(states):
        kept = [
            {*tensors, *custom_handled, *plain, *(["a place in a parameter group"] if is_held else ())}
            for tensors, custom_handled, plain, is_held in (described[at] for described in everyone)
        ]
        anywhere = set().union(*kept)
        for rank, here, row in zip(ranks, kept, numels, strict=True):
            if anywhere - here and row[at]:
                lacking.setdefault((rank, ", ".join(sorted(anywhere - here))), []).append(str(state.param))
    if lacking:
        told = "; ".join(
            f"rank {rank} lacks {names} of {some_of(params, 12)}" for (rank, names), params in lacking.items()
        )
        raise UsageError(
            f"Optimizer states that other ranks have are missing, so nothing was saved: {told}. A rank may lack the "
            "states of parameters that it has no elements of, and no others: build the optimizer from the same "
            "parameters on every rank, and step it on every rank or on none."
        )
