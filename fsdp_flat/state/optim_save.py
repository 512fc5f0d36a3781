"""Implements ``optim_state_dict``: saves an optimizer's states under parameter names, with any codec.

Ranks read their states as shards and other values, compare these, and complete those of empty local shards, for which
an optimizer may keep none (``state/optim_states.py``); then they encode the shards. An optimizer that computes with
unsharded parameters (``fsdp_flat.MatrixOptimizer``) lists their owners in ``state_owners``: one rank of the shard group
has the full states of such a parameter, of any shape, and the others have none. To a codec that is one more partition.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.api import OptimStateDictConfig, StatePart
from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    UntilRanksMeet,
    agree,
    dtype_from_name,
    exchange_bytes,
    reported_failure,
)
from fsdp_flat.core import units_of
from fsdp_flat.errors import some_of
from fsdp_flat.layout import ReplicatedPartition
from fsdp_flat.state.codecs import FULL, FullCodec
from fsdp_flat.state.optim_states import OptimStates, ParamState, complete_over_groups, contents_of
from fsdp_flat.state.shards import (
    Config,
    IndexedParam,
    OptimContents,
    ParamIndex,
    StateDictCodec,
    StateShard,
    TensorTransfer,
    copied_state,
    held_by,
    is_scalar,
    rank_groups_of,
    redistribute,
)
from fsdp_flat.state.state_settings import own_settings
from fsdp_flat.user_warnings import warn_user

_MERGING = ErrorTexts("merging optimizer states")
# A parameter and the name of one of its states.
Place = tuple[IndexedParam, str]
# By name of a parameter, its states by name.
Rows = dict[str, dict[str, Any]]


def save_optim_state(
    model: nn.Module,
    optim: Any,
    state_dict: dict[str, Any] | None,
    *,
    codec: StateDictCodec,
    config: OptimStateDictConfig,
) -> dict[str, Any]:
    """Return the state dict of an optimizer, or the given one, keyed by names. Every rank must call this.

    If the codec does not communicate, nothing is communicated except with registered handlers or owned parameters.
    With ``config.rank0_only`` ranks other than the first of all send their shards and return an empty dict.
    """
    index, contents, until_met, sent = ParamIndex(model), OptimContents(()), UntilRanksMeet(), config
    states: OptimStates | None = None
    with until_met:
        for unit in units_of(model):
            unit.step.recover()
        contents = held_by(optim)
    # Handlers are registered, and parameters owned, on every rank alike, so all ranks take the same branch.
    handled = any(own_settings(unit).optim_handlers for unit in index.units)
    compares = handled or codec.communicates or bool(contents.owners)
    with until_met:
        contents = contents_of(optim, index, state_dict)
        is_full = isinstance(codec, FullCodec)
        states = OptimStates.read(index, contents, compares=compares, keeps_dtensors=not is_full)
    if compares:
        if config.rank0_only > complete_over_groups(index, states, until_met, rank0_only=config.rank0_only):
            # An option of each rank: those that keep nothing send to all.
            sent = copy.copy(config)
            sent.rank0_only = False
    elif until_met.error is not None:
        raise until_met.error
    assert states is not None
    if not compares and contents.state:
        _warn_of_gaps(states.states)
    with torch.no_grad(), reported_failure(index.rank_groups if compares else ()):
        values = encoded_states(states.states, codec, sent)
        values |= merged_states(states.states, sent)
    rows = rows_of(states, values, codec, config)
    if config.rank0_only and any(each.rank for unit in index.units for each in unit.options.groups.rank_groups):
        return {}
    groups = named_groups(states)
    return {"state": rows} if groups is None else {"state": rows, "param_groups": groups}


def named_groups(states: OptimStates) -> list[dict[str, Any]] | None:
    """Return copies of parameter groups with the names of their parameters; None if no groups are known."""
    if states.contents.groups is None:
        return None
    groups = []
    for group, params in zip(states.contents.groups, states.names[1:], strict=True):
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        if "param_names" in settings:
            # The optimizer was built from named parameters, whose names contain wrapper prefixes.
            settings["param_names"] = list(params)
        groups.append({**settings, "params": params})
    return groups


def encoded_states(
    states: Sequence[ParamState], codec: StateDictCodec, config: Config, *, on_owner: bool = False
) -> dict[Place, Any]:
    """Return the value of each tensor; those of another shape than their parameter's are full tensors.

    With ``on_owner`` these are the owner's own, so that nothing is communicated; other ranks have none.
    """
    alike: list[StateShard] = []
    others: list[StateShard] = []
    # Every rank exchanges states in the same order.
    for state in states:
        for name in sorted(state.tensors):
            shard = state.tensors[name]
            (alike if shard.shape == shard.param.shape else others).append(shard)
    values = codec.encode(alike, config)
    if on_owner:
        for shard in others:
            value = shard.local.view(shard.shape)
            values.append(value.to("cpu", copy=True) if config.offload_to_cpu else value)
    elif others:
        values += (codec if isinstance(codec, FullCodec) else FULL).encode(others, config)
    return {(shard.param, shard.state or ""): value for shard, value in zip([*alike, *others], values, strict=True)}


def rows_of(
    states: OptimStates, values: Mapping[Place, Any], codec: StateDictCodec, config: Config, *, copies: bool = True
) -> Rows:
    """Return the states by name of a parameter, in the order of a state dict, without those that this rank lacks.

    ``values`` are those of the tensors of managed parameters. Without ``copies`` other tensors are as they are.
    """
    by_name: Rows = {}
    for state in states.states:
        if state.tensors or state.handled or state.plain:
            values_of_param = dict(state.plain)
            for name in (*state.tensors, *state.handled):
                value = values.get((state.param, name))
                if value is not None:
                    values_of_param[name] = value
            by_name[state.param.fqn] = dict(sorted(values_of_param.items()))
    by_name |= _others(states.index, states.contents, codec, config, copies=copies)
    return {name: by_name[name] for name in (*states.names[0], *sorted(by_name)) if name in by_name}


def _others(index: ParamIndex, contents: OptimContents, codec: StateDictCodec, config: Config, *, copies: bool) -> Rows:
    """Return by name the states of parameters that no unit manages; without ``copies`` tensors as they are."""
    held, offload = set(contents.params), config.offload_to_cpu
    by_name: Rows = {}
    for param, name in index.others.items():
        if param in held and param in contents.state:
            states = contents.state[param]
            if param in index.dtensors:
                states = {key: codec.of_dtensor(states[key], config) for key in sorted(states)}
            by_name[name] = {
                key: value
                if not copies and isinstance(value, torch.Tensor) and not is_scalar(value)
                else copied_state(value, "cpu" if offload or is_scalar(value) else None)
                for key, value in states.items()
            }
    return by_name


def _warn_of_gaps(states: Sequence[ParamState]) -> None:
    """Warn of states that this rank lacks for elements that it holds; whether other ranks do is not checked."""
    lacking = [str(state.param) for state in states if state.param.numel and state.is_held and not state.names()]
    if lacking:
        warn_user(
            f"The optimizer of rank {dist.get_rank()} has states, but none of {some_of(lacking, 6)}, of which the "
            "rank holds elements. That is right for parameters that have had no gradient yet. With this state-dict "
            "type ranks do not compare what they have: if another rank has these states, the checkpoint is incomplete."
        )


def merged_states(states: Sequence[ParamState], config: Config, *, in_turn: bool = False) -> dict[Place, torch.Tensor]:
    """Merge every state that has a handler: each for rank 0 of its shard group, for one rank in turn, or for all ranks.

    Every rank must call this with the same states in the same order.
    """
    own: dict[Place, torch.Tensor | None] = {}
    by_rank_group: dict[RankGroup, list[Place]] = {}
    for state in states:
        for name, tensor in sorted(state.handled.items()):
            part = None if tensor is None or not state.param.numel else tensor.detach()
            own[state.param, name] = None if part is None else part.to(state.param.unit.options.device).contiguous()
            by_rank_group.setdefault(state.param.rank_group, []).append((state.param, name))
    if not own:
        return {}
    found, until_met = dict[Place, torch.Tensor](), UntilRanksMeet()
    units = list(dict.fromkeys(param.unit for param, _ in own))
    for rank_group, places in by_rank_group.items():
        kinds = [None if (part := own[place]) is None else (str(part.dtype), list(part.shape)) for place in places]
        texts = exchange_bytes(json.dumps(kinds).encode(), rank_group)
        for position, ((param, name), *each_kind) in enumerate(zip(places, *map(json.loads, texts), strict=True)):
            dst = 0 if config.rank0_only else position % rank_group.size if in_turn else None
            parts = _parts_on(param, own.pop((param, name)), each_kind, dst=dst)
            handler = own_settings(param.unit).optim_handlers.get(name)
            # A rank whose handler raises still takes part in the remaining exchanges, so that the others do not hang.
            if handler is not None and until_met.error is None and dst in (None, rank_group.rank):
                with until_met:
                    merged = handler.merge(parts, torch.Size(param.shape)).detach()
                    to = "cpu" if config.offload_to_cpu else merged.device
                    found[param, name] = merged.to(to, copy=True).contiguous()
    agree([], until_met.error, rank_groups_of(units), _MERGING)
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
