"""Implements ``optim_state_dict``: saves an optimizer's states under parameter names, with any codec.

Ranks read their states as shards and other values, compare these, complete those of empty local shards, for which an
optimizer may keep none, and encode the shards. An optimizer that computes with unsharded parameters
(``fsdp_flat.MatrixOptimizer``) lists their owners in ``state_owners``: one rank of the shard group has the full states
of such a parameter, of any shape, and the others have none. To a codec that is one more partition.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import OptimStateDictConfig, StatePart
from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    agree,
    barrier,
    digest_of,
    dtype_from_name,
    exchange_bytes,
    exchange_if_different,
    global_ranks,
)
from fsdp_flat.errors import FsdpFlatError, OptionError, UnsupportedError, UsageError, some_of
from fsdp_flat.layout import ReplicatedPartition
from fsdp_flat.state.codecs import FULL
from fsdp_flat.state.shards import (
    Config,
    IndexedParam,
    OptimContents,
    ParamIndex,
    StateDictCodec,
    StateShard,
    TensorTransfer,
    copied_state,
    is_scalar,
    plain_from_json,
    plain_to_json,
    rank_groups_of,
    redistribute,
    refuse_split,
)
from fsdp_flat.user_warnings import warn_user

_MERGING = ErrorTexts("merging optimizer states")
_SAVING = ErrorTexts(
    "saving an optimizer's state", "Ranks save different optimizer states.", "Save the same on every rank."
)

# A parameter and the name of one of its states.
Place = tuple[IndexedParam, str]
# By name of a parameter, its states by name.
Rows = dict[str, dict[str, Any]]


class Peers(Protocol):
    """Exchanges values between all ranks of a checkpoint; ``ranks`` are their global ranks."""

    ranks: list[int]

    def integers(self, values: list[int], error: Exception | None) -> list[list[int]]:
        """All-gather integers, as many on every rank, in one collective; raise on all ranks if one has an error."""

    def texts(self, text: str) -> list[str]:
        """All-gather texts."""


def save_optim_state(
    index: ParamIndex,
    contents: OptimContents,
    *,
    codec: StateDictCodec,
    config: OptimStateDictConfig,
    peers: Peers | None = None,
    error: Exception | None = None,
) -> dict[str, Any]:
    """Return the state dict of an optimizer, keyed by names. Every rank must call this, also with an ``error``.

    If the codec does not communicate, nothing is communicated except with registered handlers, owned parameters or
    ``peers``. With ``config.rank0_only`` ranks other than the first of all send their shards and return an empty dict.

    A checkpoint passes ``peers``, through which ranks compare their states, and such a codec; each state of another
    shape (which has a handler, or whose parameter has an owner) is returned on one rank only, as a full tensor.
    """
    # Handlers are registered, and parameters owned, on every rank alike, so all ranks take the same branch.
    shared = bool(contents.owners) or any(unit.optim_state_handlers for unit in index.units)
    is_alone = peers is None and not codec.communicates and not shared
    if peers is None and not is_alone:
        for rank_group in dict.fromkeys(unit.options.groups.shard for unit in index.units):
            barrier("optim_state_dict", rank_group)
    names: list[list[str]] = []
    states: list[_ParamState] = []
    values: dict[Place, Any] = {}
    try:
        names, states = _names(index, contents), _read_states(index, contents)
        if peers is not None:
            # Copied before ranks compare, since there may not be enough memory on one of them.
            values = _encoded(states, codec, config, on_owner=True)
    except Exception as raised:
        error = error or raised
    if peers is not None:
        _compare(index, states, names=names, error=error, peers=peers)
    elif not is_alone:
        error = _complete_over_groups(index, states, names=names, error=error)
        lines = [
            f"state {key!r} of {param.fqn!r}"
            for visible, param in index.dtensors.items()
            for key, value in sorted(contents.state.get(visible, {}).items())
            if isinstance(value, DTensor)
        ]
        agree(lines, error, index.rank_groups, index.device, _SAVING)
    if error is not None:
        raise error
    if is_alone and contents.state:
        _warn_of_gaps(states)
    with torch.no_grad():
        values = values if peers is not None else _encoded(states, codec, config, on_owner=False)
        values |= _merged_states(states, config, in_turn=peers is not None)
    rows = {**_rows(states, values), **_others(index, contents, codec, config)}
    if config.rank0_only and any(each.rank for unit in index.units for each in unit.options.groups.rank_groups):
        return {}
    order, *held = names
    placed = dict.fromkeys([*(fqn for fqn in order if fqn in rows), *sorted(rows)])
    state: dict[str, Any] = {"state": {name: rows[name] for name in placed}}
    if contents.groups is not None:
        state["param_groups"] = _groups_of(contents.groups, held)
    return state


def _groups_of(groups: Sequence[Mapping[str, Any]], names: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Return copies of parameter groups with the names of their parameters."""
    found = []
    for group, params in zip(groups, names, strict=True):
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        if "param_names" in settings:
            # The optimizer was built from named parameters, whose names contain wrapper prefixes.
            settings["param_names"] = list(params)
        found.append({**settings, "params": params})
    return found


def _encoded(
    states: Sequence[_ParamState], codec: StateDictCodec, config: Config, *, on_owner: bool
) -> dict[Place, Any]:
    """Return the value of each tensor; those of another shape than their parameter's are full tensors.

    With ``on_owner`` these are the owner's own, so that nothing is communicated; other ranks have none.
    """
    # Every rank exchanges states in the same order.
    shards = [state.tensors[name] for state in states for name in sorted(state.tensors)]
    alike = [shard for shard in shards if shard.shape == shard.param.shape]
    others = [shard for shard in shards if shard.shape != shard.param.shape]
    values = codec.encode(alike, config)
    if on_owner:
        full = [shard.local.view(shard.shape) for shard in others]
        values += [value.to("cpu", copy=True) if config.offload_to_cpu else value for value in full]
    else:
        values += FULL.encode(others, config)
    return {(shard.param, shard.state or ""): value for shard, value in zip([*alike, *others], values, strict=True)}


def _rows(states: Sequence[_ParamState], values: Mapping[Place, Any]) -> Rows:
    """Return by name of a parameter its states, without those that this rank has no value of."""
    rows: Rows = {}
    for state in states:
        if state.names:
            tensors = {name: values.get((state.param, name)) for name in (*state.tensors, *state.handled)}
            row = {**state.plain, **{name: value for name, value in tensors.items() if value is not None}}
            rows[state.param.fqn] = {key: row[key] for key in sorted(row)}
    return rows


def _others(index: ParamIndex, contents: OptimContents, codec: StateDictCodec, config: Config) -> Rows:
    """Return by name the states of parameters that no unit manages."""
    held, offload = set(contents.params), config.offload_to_cpu
    found: Rows = {}
    for param, name in index.others.items():
        if param in held and param in contents.state:
            row = contents.state[param]
            if param in index.dtensors:
                row = {key: codec.of_dtensor(row[key], config) for key in sorted(row)}
            found[name] = {k: copied_state(v, "cpu" if offload or is_scalar(v) else None) for k, v in row.items()}
    return found


def _names(index: ParamIndex, contents: OptimContents) -> list[list[str]]:
    """Return the names of an optimizer's parameters in its order, then those in each of its groups.

    FSDP1 saves flat parameters in that order; if all parameters are original, which are sorted, none are first.
    """
    names = [[fqn for param in group["params"] for fqn in index.fqns_of(param)] for group in contents.groups or ()]
    if all(unit.options.use_orig_params for unit in index.units):
        return [[], *names]
    return [[fqn for param in contents.params for fqn in index.fqns_of(param)], *names]


def _merge_names(index: ParamIndex, names: list[list[str]], everyone: Sequence[list[list[str]]]) -> None:
    """Add the names that other ranks hold: rank 0's in its order, then others in the order of the model.

    An optimizer may be built from only the parameters that its rank has elements of; a saved group names those of all.
    """
    if any(len(theirs) != len(names) for theirs in everyone):
        return
    places = {param.fqn: place for place, param in enumerate(index.params)}
    for at, of_ranks in enumerate(zip(*everyone, strict=True)):
        lacking = {fqn for each in of_ranks for fqn in each}.difference(of_ranks[0])
        names[at] = [*of_ranks[0], *sorted(lacking, key=lambda fqn: (places.get(fqn, len(places)), fqn))]


@dataclass(slots=True)
class _ParamState:
    """Holds the optimizer states of one parameter, by name: tensors of several elements, those with handlers, others.

    ``owner`` is the rank of the shard group that has them all; ``is_held``: this rank's optimizer holds the parameter.
    A state with a handler is None if only other ranks have it.
    """

    param: IndexedParam
    owner: int | None
    is_held: bool = False
    tensors: dict[str, StateShard] = field(default_factory=dict)
    handled: dict[str, torch.Tensor | None] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.tensors, *self.handled, *self.plain}

    def describe(self, *, with_values: bool = True) -> list[Any]:
        """Describe the states as JSON, equal on every rank that has the same ones; without values by name and dtype."""
        tensors = {
            name: [str(shard.local.dtype), [] if self.owner is None else shard.shape]
            for name, shard in sorted(self.tensors.items())
        }
        plain = {name: plain_to_json(value) if with_values else [] for name, value in sorted(self.plain.items())}
        return [tensors, sorted(self.handled), plain, self.is_held]

    def complete(self, tensors: dict[str, Any], handled: list[str], plain: dict[str, Any], _is_held: bool) -> None:
        """Add the states that another rank has described."""
        for name, (dtype_name, shape) in tensors.items():
            if name not in self.tensors:
                shape, numel = (self.param.shape, self.param.local_shard.numel) if self.owner is None else (shape, 0)
                device = self.param.handle.flat_param.device
                local = torch.zeros(numel, dtype=dtype_from_name(dtype_name), device=device)
                self.tensors[name] = StateShard(self.param, local, tuple(shape), name, self.owner)
            elif str(self.tensors[name].local.dtype) != dtype_name:
                raise OptionError(
                    f"State {name!r} of {self.param.fqn!r} (unit {self.param.unit.name!r}) is "
                    f"{self.tensors[name].local.dtype} on rank {self.param.rank_group.rank} of the shard group and "
                    f"{dtype_name} on another."
                )
        for name in handled:
            self.handled.setdefault(name, None)
        for name, encoded in plain.items():
            if name not in self.plain:
                self.plain[name] = plain_from_json(*encoded)


def _read_states(index: ParamIndex, contents: OptimContents) -> list[_ParamState]:
    """Read this rank's states of every parameter; shards are views of the optimizer's tensors."""
    found: dict[IndexedParam, _ParamState] = {}
    held = set(contents.params)
    for visible, params in index.managed.items():
        owner = contents.owners.get(visible)
        states = [_ParamState(param, owner, visible in held) for param in params]
        found.update(zip(params, states, strict=True))
        # States of empty local shards are never updated (a step count, for one): use those of other ranks.
        if owner is None:
            is_here = visible in held and not params[0].is_on_other_ranks
        else:
            is_here = owner == params[0].rank_group.rank
        if is_here and visible in contents.state:
            _read(states, visible, contents.state[visible])
    return [found[param] for param in index.params]


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(entry, torch.Tensor) or _holds_tensors(entry) for entry in values)


def _read(states: Sequence[_ParamState], visible: nn.Parameter, values: Mapping[str, Any]) -> None:
    """Read the states of a parameter of the optimizer, which may hold several parameters of the model."""
    first, is_owned = states[0].param, states[0].owner is not None
    where = f"{first.fqn!r} (unit {first.unit.name!r})"
    for name, value in values.items():
        if name in first.unit.optim_state_handlers and not is_owned:
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
            states[0].handled[name] = value
        elif is_owned and _holds_tensors(value):
            raise UnsupportedError(
                f"State {name!r} of {where} is a {type(value).__name__} of tensors; state dicts hold tensors, numbers "
                "and other plain values. Save the optimizer's own state_dict() rank by rank, which fits the same "
                "number of ranks only, or use an optimizer that keeps each tensor under a name."
            )
        elif is_scalar(value):
            for state in states:
                state.plain[name] = copied_state(value, "cpu")
        elif value.shape != visible.shape and not is_owned:
            raise UnsupportedError(
                f"State {name!r} of {where} has shape {tuple(value.shape)} on rank {first.rank_group.rank} of the "
                "shard group; it is neither a scalar nor shaped like the rank's part of the parameter, "
                f"{tuple(visible.shape)}. Say how it is put together by fsdp_flat.register_optim_state_handler"
                f"(model, {name!r}, merge=..., split=...)."
            )
        else:
            for state in states:
                shape = tuple(value.shape) if is_owned else state.param.shape
                local = state.param.part_of(value.detach().reshape(-1))
                state.tensors[name] = StateShard(state.param, local, shape, name, state.owner)


def _warn_of_gaps(states: Sequence[_ParamState]) -> None:
    """Warn of states that this rank lacks for elements that it holds; whether other ranks do is not checked."""
    found = [
        str(state.param) for state in states if state.param.local_shard.numel and state.is_held and not state.names
    ]
    if found:
        warn_user(
            f"The optimizer of rank {dist.get_rank()} has states, but none of {some_of(found, 6)}, of which the "
            "rank holds elements. That is right for parameters that have had no gradient yet. With this state-dict "
            "type ranks do not compare what they have: if another rank has these states, the checkpoint is incomplete."
        )


def _complete_over_groups(
    index: ParamIndex, states: Sequence[_ParamState], *, names: list[list[str]], error: Exception | None
) -> Exception | None:
    """Complete the states and names of this rank from those of the others, group by group.

    Every rank must call this, even one that could not read its states. Normally all ranks have the same states, and
    one integer is exchanged per group. Returns the exception that stopped this rank before or now, to agree on next.
    """
    groups = {unit: rank_groups_of([unit]) for unit in index.units}
    for rank_group in index.rank_groups:
        own = [state for state in states if rank_group in groups[state.param.unit]] if error is None else []
        said = [names, [state.describe() for state in own]]
        payload, compared = (b"" if error else json.dumps(each).encode() for each in ([*said, _numels(own)], said))
        payloads = exchange_if_different(payload, rank_group, index.device, compared=compared)
        if payloads is not None and all(payloads):
            assert rank_group.group is not None
            try:
                ranks = global_ranks(rank_group.group)
                _complete_states(index, own, names=names, ranks=ranks, payloads=payloads)
            except FsdpFlatError as found:
                error = found
    return error


def _numels(states: Sequence[_ParamState]) -> list[int]:
    """Return how many elements this rank must have states of; owners have all states of their parameters."""
    return [0 if state.owner is not None else state.param.local_shard.numel for state in states]


def _compare(
    index: ParamIndex, states: Sequence[_ParamState], *, names: list[list[str]], error: Exception | None, peers: Peers
) -> None:
    """Compare the states of all ranks in one collective of an integer a parameter.

    A rank describes the parameters of which it has elements. Where descriptions differ, and with handlers and owned
    parameters, for which every rank needs to know all states, a second exchange names the difference or completes them.
    """
    digests, numels = [0] * len(index.params), _numels(states)
    for at, (state, numel) in enumerate(zip(states, numels, strict=True) if error is None else ()):
        digests[at] = digest_of(json.dumps(state.describe(with_values=False)).encode()) if numel else 0
    rows = peers.integers([digest_of(json.dumps(names).encode()), *digests], error)
    needs_all = any(unit.optim_state_handlers for unit in index.units) or any(s.owner is not None for s in states)
    alike = len({row[0] for row in rows}) == 1 and all(len({*column} - {0}) <= 1 for column in zip(*rows, strict=True))
    if needs_all or not alike:
        own = [names, [state.describe() for state in states], numels]
        _complete_states(index, states, names=names, ranks=peers.ranks, payloads=peers.texts(json.dumps(own)))


def _complete_states(
    index: ParamIndex,
    states: Sequence[_ParamState],
    *,
    names: list[list[str]],
    ranks: Sequence[int],
    payloads: Sequence[str | bytes],
) -> None:
    """Complete states and names from the payloads of ``ranks``; raise if one lacks a state of elements that it has."""
    each_names, everyone, numels = zip(*map(json.loads, payloads), strict=True)
    lacking: dict[tuple[int, str], list[str]] = {}
    for at, state in enumerate(states):
        kept = [
            {*tensors, *handled, *plain, *(["a place in a parameter group"] if is_held else ())}
            for tensors, handled, plain, is_held in (described[at] for described in everyone)
        ]
        anywhere = set().union(*kept)
        for rank, here, row in zip(ranks, kept, numels, strict=True):
            if anywhere - here and row[at]:
                lacking.setdefault((rank, ", ".join(sorted(anywhere - here))), []).append(str(state.param))
    if lacking:
        told = "; ".join(f"rank {rank} lacks {keys} of {some_of(fqns, 12)}" for (rank, keys), fqns in lacking.items())
        raise UsageError(
            f"Optimizer states that other ranks have are missing, so nothing was saved: {told}. A rank may lack the "
            "states of parameters that it has no elements of, and no others: build the optimizer from the same "
            "parameters on every rank, and step it on every rank or on none."
        )
    for at, state in enumerate(states):
        for described in everyone:
            state.complete(*described[at])
    _merge_names(index, names, each_names)


def _merged_states(states: Sequence[_ParamState], config: Config, *, in_turn: bool) -> dict[Place, torch.Tensor]:
    """Merge every state that has a handler: each for rank 0 of its shard group, for one rank in turn, or for all ranks.

    Every rank must call this with the same states in the same order.
    """
    own: dict[Place, torch.Tensor | None] = {}
    by_rank_group: dict[RankGroup, list[Place]] = {}
    for state in states:
        for name, tensor in sorted(state.handled.items()):
            part = None if tensor is None or state.param.local_shard.is_empty else tensor.detach()
            own[state.param, name] = None if part is None else part.to(state.param.unit.options.device).contiguous()
            by_rank_group.setdefault(state.param.rank_group, []).append((state.param, name))
    if not own:
        return {}
    found: dict[Place, torch.Tensor] = {}
    error: Exception | None = None
    units = list(dict.fromkeys(param.unit for param, _ in own))
    for rank_group, places in by_rank_group.items():
        kinds = [None if (part := own[place]) is None else (str(part.dtype), list(part.shape)) for place in places]
        text, device = json.dumps(kinds).encode(), units[0].options.device
        texts = [text] if rank_group.group is None else exchange_bytes(text, rank_group.group, device)
        for position, ((param, name), *each_kind) in enumerate(zip(places, *map(json.loads, texts), strict=True)):
            dst = 0 if config.rank0_only else position % rank_group.size if in_turn else None
            parts = _parts_on(param, own.pop((param, name)), each_kind, dst=dst)
            handler = param.unit.optim_state_handlers.get(name)
            # A rank whose handler raises still takes part in the remaining exchanges, so that the others do not hang.
            if handler is not None and error is None and dst in (None, rank_group.rank):
                try:
                    merged = handler.merge(parts, torch.Size(param.shape)).detach()
                    to = "cpu" if config.offload_to_cpu else merged.device
                    found[param, name] = merged.to(to, copy=True).contiguous()
                except Exception as raised:
                    error = raised
    agree([], error, rank_groups_of(units), units[0].options.device, _MERGING)
    return found


def _parts_on(
    param: IndexedParam, own: torch.Tensor | None, kinds: Sequence[tuple[str, list[int]] | None], *, dst: int | None
) -> list[StatePart]:
    """Gather the parts of one state on rank ``dst`` of the shard group; for None, on every rank."""
    rank_group, partition, device = param.rank_group, param.partition, param.unit.options.device
    is_wanted = dst in (None, rank_group.rank)
    found, transfers = [], []
    for rank, kind in enumerate(kinds):
        if kind is None:
            continue
        dtype, numel = dtype_from_name(kind[0]), torch.Size(kind[1]).numel()
        is_own = rank == rank_group.rank
        part = own if is_own else torch.empty(kind[1] if is_wanted else 0, dtype=dtype, device=device)
        assert part is not None
        held, wanted = (ReplicatedPartition(numel, each, rank_group.size) for each in (rank, dst))
        # This rank's own part is not copied to itself.
        source, target = part.view(-1) if is_own else None, part.view(-1) if is_wanted and not is_own else None
        transfers.append(TensorTransfer(rank_group, held, wanted, source, target, device, numel * dtype.itemsize))
        if is_wanted:
            found.append(StatePart(part, partition[rank].start, partition[rank].stop))
    redistribute(transfers)
    return found
