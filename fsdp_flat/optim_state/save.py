"""``optim_state_dict``: an optimizer's state under parameter names, whole or in dim-0 chunks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.optim_state.names import OptimContents, ParamNames, names_of
from fsdp_flat.optim_state.table import HandleStates, agree_on_states, read_states
from fsdp_flat.runtime import Unit
from fsdp_flat.state_dict import boxed_values, chunked, refuse_split, shard_to_chunks

__all__ = ["save_optim_state"]


def save_optim_state(
    model: nn.Module,
    contents: OptimContents,
    *,
    whole: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    boxes: bool = False,
) -> dict[str, Any]:
    """The state dict of an optimizer under names.

    Every rank must call this.

    Args:
        model: what the optimizer's parameters are found in.
        contents: the optimizer's.
        whole: whole tensors, else torch's types with dim-0 chunks.
        rank0_only: with ``whole``, ranks other than 0 of their shard group return an empty dict.
        offload_to_cpu: values on the CPU.
        boxes: without ``whole``, boxes of this rank's states in place of chunks; nothing is communicated then.

    Raises:
        OptionError: the optimizer holds a parameter that is none of the model's.
        UnsupportedError: a state that fits neither the rank's part of its parameter nor a scalar.
    """
    names = names_of(model)
    groups = _groups(names, contents)
    states = read_states(names, contents)
    if not boxes:
        states = agree_on_states(names, states)
    keep = True
    if whole and rank0_only:
        keep = all(unit.options.groups.primary.rank == 0 for unit, _, _ in names.handles)
    by_name: dict[str, dict[str, Any]] = {}
    for unit, handle, fqns in names.handles:
        found = _named_states(unit, handle, states[handle], whole=whole, keep=keep, offload=offload_to_cpu, boxes=boxes)
        there = [index for index, has in enumerate(states[handle].slots_with_state()) if has]
        # FSDP1's order: that of the flat parameter, or sorted within a unit with original parameters.
        for index in sorted(there, key=fqns.__getitem__) if unit.options.use_orig_params else there:
            by_name[fqns[index]] = {**states[handle].plain[index], **found[index]}
    for param, name in names.others.items():
        if param in contents.state:
            by_name[name] = {key: _copied(value, offload_to_cpu) for key, value in contents.state[param].items()}
    if not keep:
        return {}
    return {"state": by_name, "param_groups": groups}


def _copied(value: Any, offload: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach().clone()
    return value.cpu() if offload or value.dim() == 0 else value


def _groups(names: ParamNames, contents: OptimContents) -> list[dict[str, Any]]:
    groups = []
    for group in contents.groups:
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        fqns = [fqn for param in group["params"] for fqn in names.fqns_of(param)]
        groups.append({**settings, "params": fqns})
    return groups


def _named_states(
    unit: Unit, handle: FlatParamHandle, states: HandleStates, *, whole: bool, keep: bool, offload: bool, boxes: bool
) -> list[dict[str, Any]]:
    """By slot, the tensor states."""
    found: list[dict[str, Any]] = [{} for _ in handle.layout.slots]
    for name, shard in states.shards.items():
        if whole:
            values = _whole_values(unit, handle, shard)
        elif boxes:
            refuse_split(unit, "The sharded optimizer state")
            own = shard.cpu() if offload else shard
            values = boxed_values(handle.layout, unit.options.groups.shard.rank, own)
        else:
            values = _chunked_values(unit, handle, shard, offload)
        if not keep:
            continue
        for index, value in enumerate(values):
            if states.has[name][index]:
                found[index][name] = value.cpu() if offload and whole else value
    return found


def _whole_values(unit: Unit, handle: FlatParamHandle, shard: torch.Tensor) -> list[torch.Tensor]:
    flat = unit.gather_tensor(handle, shard)
    parts = [flat[slot.interval.to_slice()].view(slot.shape).clone() for slot in handle.layout.slots]
    guises = [entry.guise for entry in handle.views.params]
    return [guise.whole(guise.shown(part)) for guise, part in zip(guises, parts, strict=True)]


def _chunked_values(unit: Unit, handle: FlatParamHandle, shard: torch.Tensor, offload: bool) -> list[torch.Tensor]:
    groups = unit.options.groups
    refuse_split(unit, "The sharded optimizer state")
    chunks = shard_to_chunks(handle.layout, shard, groups.shard)
    chunks = [chunk.cpu() if offload else chunk for chunk in chunks]
    if groups.shard.size == 1:
        return chunks
    return [
        chunked(chunk, slot.shape, groups.shard, groups.mesh)
        for chunk, slot in zip(chunks, handle.layout.slots, strict=True)
    ]
