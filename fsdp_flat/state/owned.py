"""Saves states of parameters that one rank of the shard group owns: full tensors there, and nothing on other ranks.

An optimizer that computes with unsharded parameters (``fsdp_flat.MatrixOptimizer``) lists their owners in
``state_owners``. Its states may have any shape, so they are transferred directly from their owner to the values of the
state dict, never as shards. A state of the parameter's shape is saved in the same type as a sharded state, so any
optimizer can load it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_flat.comm import P2PChannels
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import Interval, ReplicatedPartition, boxes, plan_transfer
from fsdp_flat.runtime import Unit
from fsdp_flat.state.boxed import BoxedTensor
from fsdp_flat.state.chunk_specs import ShardWithSpec, chunk_spec, chunks_of
from fsdp_flat.state.optim_params import ParamNames, is_scalar

__all__ = [
    "OwnedEntry",
    "OwnedState",
    "Owners",
    "boxed_owned",
    "chunked_owned",
    "owned_entries",
    "owned_tensors",
    "owners_by_slot",
    "whole_owned",
]

# By handle and parameter index, the rank of the shard group that owns the parameter.
Owners = Mapping[tuple[FlatParamHandle, int], int]
# A handle, the index of a parameter in it, and the name of a state.
_Place = tuple[FlatParamHandle, int, str]


@dataclass(frozen=True, slots=True)
class OwnedState:
    """Describes one state of an owned parameter.

    Attributes:
        tensor: the full state, on the owner; None on other ranks.
        shape: its shape.
        dtype: its dtype.
    """

    tensor: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OwnedEntry:
    """Describes one state that is saved, with its parameter and owner.

    Attributes:
        unit, handle, index: the unit and handle of its parameter, and the parameter's index in the handle.
        name: the name of the state.
        state: the state, with its tensor on the owner only.
        owner: the rank of the shard group that holds it.
    """

    unit: Unit
    handle: FlatParamHandle
    index: int
    name: str
    state: OwnedState
    owner: int

    @property
    def place(self) -> _Place:
        """Key of the state in a save."""
        return self.handle, self.index, self.name

    @property
    def is_like_param(self) -> bool:
        """Return whether it has the parameter's unsharded shape."""
        return self.state.shape == tuple(self.handle.layout.param_infos[self.index].shape)

    @property
    def held(self) -> ReplicatedPartition:
        """Partition of its elements: all on the owner."""
        return ReplicatedPartition(math.prod(self.state.shape), self.owner, self.unit.options.groups.shard.size)

    @property
    def source(self) -> torch.Tensor:
        """1-D tensor of its elements on this rank; empty except on the owner."""
        if self.state.tensor is None:
            return torch.empty(0, dtype=self.state.dtype, device=self.handle.flat_param.device)
        return self.state.tensor.detach().reshape(-1)


def owners_by_slot(names: ParamNames, owners: Mapping[nn.Parameter, int]) -> dict[tuple[FlatParamHandle, int], int]:
    """Return the owners that an optimizer lists, by handle and parameter index."""
    return {
        (managed.handle, index): owners[param]
        for param, managed in names.managed.items()
        if param in owners
        for index in managed.indices
    }


def owned_tensors(what: str, values: Mapping[str, Any]) -> dict[str, OwnedState]:
    """Return the states of an owned parameter that are tensors but not scalars, on its owner.

    Raises:
        UnsupportedError: a state is a list, tuple or dict of tensors; ``what`` names the parameter in the text.
    """
    found = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not is_scalar(value):
            found[name] = OwnedState(value, tuple(value.shape), value.dtype)
        elif _holds_tensors(value):
            raise UnsupportedError(
                f"State {name!r} of {what} is a {type(value).__name__} of tensors; state dicts hold tensors, numbers "
                "and other plain values. Save the optimizer's own state_dict() rank by rank, which fits the same "
                "number of ranks only, or use an optimizer that keeps each tensor under a name."
            )
    return found


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return any(isinstance(entry, torch.Tensor) or _holds_tensors(entry) for entry in value)


def whole_owned(entries: Iterable[OwnedEntry], *, to_zero: bool, offload: bool) -> dict[_Place, torch.Tensor]:
    """Return the full states on every rank of the shard groups, or with ``to_zero`` on rank 0 of each.

    Every rank of the shard groups must call this with the same entries.
    """
    channels = P2PChannels()
    found: dict[_Place, torch.Tensor] = {}
    for entry in entries:
        rank_group, device = entry.unit.options.groups.shard, entry.unit.options.device
        dst = 0 if to_zero else None
        numel = math.prod(entry.state.shape)
        target = torch.empty(numel if dst in (None, rank_group.rank) else 0, dtype=entry.state.dtype, device=device)
        transfer_plan = plan_transfer(entry.held, ReplicatedPartition(numel, dst, rank_group.size), rank_group.rank)
        channels.add(rank_group, device, transfer_plan, entry.source, target, nbytes=numel * target.itemsize)
        if dst in (None, rank_group.rank):
            found[entry.place] = target.view(entry.state.shape)
    channels.wait()
    return {place: value.cpu() if offload else value for place, value in found.items()}


def chunked_owned(entries: Iterable[OwnedEntry], *, offload: bool) -> dict[_Place, torch.Tensor]:
    """Return states of their parameter's shape in torch's chunked types, all others as full tensors on every rank.

    Every rank of the shard groups must call this with the same entries.
    """
    alike, others = _by_shape(entries)
    rows = []
    for entry in alike:
        form = chunk_spec(entry.unit, entry.handle, entry.index)
        rows.append(ShardWithSpec(replace(form, local_shards=entry.held), entry.source))
    places = [entry.place for entry in alike]
    found = dict(zip(places, chunks_of(rows, offload=offload), strict=True))
    return {**found, **whole_owned(others, to_zero=False, offload=offload)}


def boxed_owned(entries: Iterable[OwnedEntry], *, once: bool, offload: bool) -> dict[_Place, torch.Tensor]:
    """Return the values that a checkpoint stores: each state from its owner, so nothing is transferred.

    Args:
        entries: the states, the same on every rank of the shard groups.
        once: return states of another shape than their parameter's on the owner only. Without it they are full tensors
            on every rank, and every rank of the shard groups must call this.
        offload: return values on the CPU.
    """
    alike, others = _by_shape(entries)
    found: dict[_Place, torch.Tensor] = {}
    for entry in alike:
        own = entry.source.to("cpu", copy=True) if offload else entry.source
        shape, run = entry.state.shape, Interval(0, own.numel())
        if math.prod(shape) == 0:
            found[entry.place] = own.new_empty(shape)
            continue
        parts = [own.view(shape)] if entry.state.tensor is not None else []
        found[entry.place] = BoxedTensor(shape, boxes(shape, run) if parts else (), parts, own.dtype, own.device)
    if not once:
        return {**found, **whole_owned(others, to_zero=False, offload=offload)}
    for entry in others:
        if entry.state.tensor is not None:
            own = entry.state.tensor.detach()
            found[entry.place] = own.to("cpu", copy=True) if offload else own
    return found


def _by_shape(entries: Iterable[OwnedEntry]) -> tuple[list[OwnedEntry], list[OwnedEntry]]:
    alike: list[OwnedEntry] = []
    others: list[OwnedEntry] = []
    for entry in entries:
        (alike if entry.is_like_param else others).append(entry)
    return alike, others


def owned_entries(
    names: ParamNames, owned: Mapping[FlatParamHandle, Mapping[int, Mapping[str, OwnedState]]], owners: Owners
) -> Iterator[OwnedEntry]:
    """Yield all states of owned parameters, in the same order on every rank."""
    for unit, handle, _ in names.handles:
        for index, row in sorted(owned[handle].items()):
            for name in sorted(row):
                yield OwnedEntry(unit, handle, index, name, row[name], owners[handle, index])
