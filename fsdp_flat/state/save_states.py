"""Implements ``optim_state_dict``: saves an optimizer's states under parameter names, with any codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_flat.api import OptimStateDictConfig
from fsdp_flat.comm import ErrorTexts, agree, barrier
from fsdp_flat.errors import some_of
from fsdp_flat.state._torch import is_scalar
from fsdp_flat.state.codecs import FULL
from fsdp_flat.state.dtensors import without_dtensors
from fsdp_flat.state.full import FullCodec
from fsdp_flat.state.handlers import merged_states
from fsdp_flat.state.optim_contents import OptimContents, complete_groups, copied_state, merged_params, named_groups
from fsdp_flat.state.param_index import IndexedParam, ParamIndex
from fsdp_flat.state.param_states import ParamState, Peers, agree_on_states, compare_states, read_states
from fsdp_flat.state.shards import StateDictCodec, StateShard
from fsdp_flat.user_warnings import warn_user

_SAVING = ErrorTexts(
    "saving an optimizer's state", "Ranks save different optimizer states.", "Save the same on every rank."
)

Groups = list[dict[str, Any]] | None


def save_optim_state(
    index: ParamIndex,
    contents: OptimContents,
    codec: StateDictCodec,
    config: OptimStateDictConfig,
    *,
    peers: Peers | None = None,
) -> dict[str, Any]:
    """Return the state dict of an optimizer, keyed by names.

    Every rank must call this.

    Args:
        index: the parameters of the model that the optimizer's belong to.
        contents: the optimizer's contents.
        codec: encodes the states that are shaped like their parameters. If it does not communicate, nothing is
            communicated except with registered handlers, owned parameters or ``peers``.
        config: the options. With ``rank0_only`` ranks other than the first of all send their shards and return an
            empty dict.
        peers: for a checkpoint, with a codec that does not communicate: ranks compare the names of their states
            through it, and each state of another shape (which has a handler, or whose parameter has an owner) is
            returned on one rank only, as a full tensor, ranks in turn.

    Raises:
        OptionError: the optimizer holds a parameter that is not the model's.
        UnsupportedError: a state that is neither shaped like the rank's local shard nor a scalar, and has no handler.
        UsageError: a rank lacks a state of elements that it holds, while other ranks have it; or other ranks did not
            call this.
        PeerFailureError: another rank raised one of these.
    """
    # Handlers are registered, and parameters owned, on every rank alike, so all ranks take the same branch.
    shared = bool(contents.owners) or any(unit.optim_state_handlers for unit in index.units)
    alone = not codec.communicates and (peers is not None or not shared)
    encoded: dict[StateShard, Any] = {}
    if peers is not None:
        groups, states, encoded = _compared_states(index, contents, codec, config, peers)
    else:
        groups, states = _read_alone(index, contents) if alone else _agreed_states(index, contents)
    order = complete_groups(index, contents, groups, alone=alone)
    with torch.no_grad():
        values = encoded if peers is not None else _encoded(states, codec, config, on_owner=False)
        handled = [((state.param, name), tensor) for state in states for name, tensor in state.custom_handled.items()]
        merged: dict[tuple[IndexedParam, str], torch.Tensor] = {}
        if handled:
            merged = merged_states(
                handled,
                lambda position, size: 0 if config.rank0_only else position % size if peers is not None else None,
                offload=config.offload_to_cpu,
            )
    others = _others(index, contents, codec, config)
    if config.rank0_only and any(
        rank_group.rank for unit in index.units for rank_group in unit.options.groups.rank_groups
    ):
        return {}
    by_name = {**_by_name(states, values, merged), **others}
    placed = dict.fromkeys([*(fqn for fqn in order if fqn in by_name), *sorted(by_name)])
    state = {"state": {name: by_name[name] for name in placed}}
    return state if groups is None else {**state, "param_groups": groups}


def _encoded(
    states: Sequence[ParamState], codec: StateDictCodec, config: OptimStateDictConfig, *, on_owner: bool
) -> dict[StateShard, Any]:
    """Return the value of each tensor; those of another shape than their parameter's are full tensors.

    Args:
        states: the states.
        codec: encodes the tensors of their parameter's shape.
        config: the options.
        on_owner: return full tensors on the owner only, so that nothing is communicated.
    """
    shards = [shard for state in states for shard in state.tensors.values()]
    alike = [shard for shard in shards if shard.shape == shard.param.shape]
    others = [shard for shard in shards if shard.shape != shard.param.shape]
    found = dict(zip(alike, codec.encode(alike, config), strict=True))
    if not on_owner:
        return {**found, **dict(zip(others, FULL.encode(others, config), strict=True))}
    for shard in others:
        if shard.owner == shard.param.rank_group.rank:
            value = shard.local.view(shard.shape)
            found[shard] = value.to("cpu", copy=True) if config.offload_to_cpu else value
    return found


def _by_name(
    states: Sequence[ParamState],
    values: Mapping[StateShard, Any],
    merged: Mapping[tuple[IndexedParam, str], torch.Tensor],
) -> dict[str, dict[str, Any]]:
    by_name: dict[str, dict[str, Any]] = {}
    for state in states:
        if state.names:
            row = {
                **state.plain,
                **{name: value for name, s in state.tensors.items() if (value := values.get(s)) is not None},
            }
            row |= {name: merged[state.param, name] for name in state.custom_handled if (state.param, name) in merged}
            by_name[state.param.fqn] = {key: row[key] for key in sorted(row)}
    return by_name


def _others(
    index: ParamIndex, contents: OptimContents, codec: StateDictCodec, config: OptimStateDictConfig
) -> dict[str, dict[str, Any]]:
    """Return by name the states of parameters that no unit manages; full tensors for DTensors if the codec has such."""
    held, offload = set(contents.params), config.offload_to_cpu
    found: dict[str, dict[str, Any]] = {}
    for param, name in index.others.items():
        if param in held and param in contents.state:
            row = dict(contents.state[param])
            if isinstance(codec, FullCodec) and param in index.dtensors:
                row = {key: without_dtensors(row[key], to_cpu=offload) for key in sorted(row)}
            found[name] = {
                key: copied_state(value, "cpu" if offload or is_scalar(value) else None) for key, value in row.items()
            }
    return found


def _read_alone(index: ParamIndex, contents: OptimContents) -> tuple[Groups, list[ParamState]]:
    states = read_states(index, contents)
    if contents.state:
        _warn_of_gaps(states)
    return named_groups(index, contents), states


def _warn_of_gaps(states: Sequence[ParamState]) -> None:
    """Warn of states that this rank lacks for elements that it holds; whether other ranks do is not checked."""
    found = [
        str(state.param) for state in states if state.param.local_shard.numel and state.is_held and not state.names
    ]
    if found:
        warn_user(
            f"The optimizer of rank {dist.get_rank()} has states, but none of {some_of(found, 6)}, of which the "
            "rank holds elements. That is right for parameters that have had no gradient yet. With boxes=True ranks do "
            "not compare what they have: if another rank has these states, the checkpoint is incomplete.",
            stacklevel=5,
        )


def _compared_states(
    index: ParamIndex, contents: OptimContents, codec: StateDictCodec, config: OptimStateDictConfig, peers: Peers
) -> tuple[Groups, list[ParamState], dict[StateShard, Any]]:
    groups, states, error = _read_or_fail(index, contents)
    encoded: dict[StateShard, Any] = {}
    try:
        # Copied before ranks compare, since there may not be enough memory on one of them.
        encoded = _encoded(states, codec, config, on_owner=True)
    except Exception as found:
        error = found
    held = [group["params"] for group in groups or ()]
    everyone = compare_states(index, states, held, error, peers)
    for group, params in zip(groups or (), merged_params(index, held, everyone), strict=True):
        group["params"] = params
    return groups, states, encoded


def _read_or_fail(index: ParamIndex, contents: OptimContents) -> tuple[Groups, list[ParamState], Exception | None]:
    try:
        return named_groups(index, contents), read_states(index, contents), None
    except Exception as error:
        return None, [], error


def _agreed_states(index: ParamIndex, contents: OptimContents) -> tuple[Groups, list[ParamState]]:
    for rank_group in dict.fromkeys(unit.options.groups.shard for unit in index.units):
        barrier("optim_state_dict", rank_group)
    groups, states, error = _read_or_fail(index, contents)
    error = agree_on_states(index, states, error)
    if index.units:
        agree(_dtensor_lines(index, contents), error, index.rank_groups, index.device, _SAVING)
    elif error is not None:
        raise error
    return groups, states


def _dtensor_lines(index: ParamIndex, contents: OptimContents) -> list[str]:
    """Describe the DTensors of an optimizer's states, which must be the same on every rank."""
    return [
        f"state {key!r} of {param.fqn!r}"
        for visible, param in index.dtensors.items()
        for key, value in sorted(contents.state.get(visible, {}).items())
        if isinstance(value, DTensor)
    ]
