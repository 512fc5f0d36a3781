"""Streams full parameters one at a time, so that never more than one parameter is unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.checkpoint.directory import boxed_state_dict
from fsdp_flat.comm import P2PChannels, RankGroup
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.layout import clean_fqn
from fsdp_flat.state import IndexedParam, ParamIndex, StateShard, full_tensor, redistribute


@dataclass(frozen=True, slots=True, eq=False)
class StateEntry:
    """Describes one entry of a model's state dict.

    Attributes:
        name: name in the unwrapped model.
        value: a plain tensor that every rank has (a buffer, an ignored parameter), or the DTensor of a parameter that
            ``fully_shard`` has sharded; None for any other managed parameter.
        shape: shape of the full tensor.
        dtype: dtype of the stored tensor.
        param: the managed parameter, or None.
        same_as: an earlier name of the same tied parameter, or None.
    """

    name: str
    value: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    param: IndexedParam | None = None
    same_as: str | None = None

    def held(self) -> torch.Tensor:
        """Return this rank's tensor: the plain tensor, or a managed parameter's local shard (a view; 1-D if flat)."""
        if self.value is not None:
            return self.value.to_local() if isinstance(self.value, DTensor) else self.value
        assert self.param is not None
        return self.param.local


def entries_of(
    model: nn.Module, *, keep: Callable[[str], bool] | None, trainable_only: bool = False
) -> list[StateEntry]:
    """List the entries of a model's state dict in its order, without communication.

    Args:
        model: a wrapper, or a module that holds wrappers.
        keep: returns whether to list the entry of a name; the same on every rank.
        trainable_only: list only parameters with ``requires_grad``, no buffers (for an adapter, say).

    Raises:
        UnsupportedError: an entry is not a tensor.
        PhaseError: called in the middle of a step.
    """
    index = ParamIndex(model)
    by_name = {**index.by_name, **index.dtensors_by_name}
    # The state dict of a compiled model has torch.compile's prefix in its names.
    template = {clean_fqn(name): value for name, value in boxed_state_dict(model).items()}
    params = model.named_parameters() if trainable_only else ()
    trainable = {clean_fqn(name) for name, param in params if param.requires_grad}
    found: list[StateEntry] = []
    first: dict[IndexedParam, str] = {}
    for name, value in template.items():
        param = by_name.get(name)
        if trainable_only:
            is_trainable = name in trainable if param is None else param.handle.views.requires_grad()[param.index]
            if not is_trainable:
                continue
        if keep is not None and not keep(name):
            continue
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(
                f"{name!r} of the state dict is a {type(value).__name__}; only tensors can be streamed. Leave it out "
                "with keep=..., and save it beside the tensors."
            )
        if param is None:
            found.append(StateEntry(name, value.detach(), tuple(value.shape), value.dtype))
            continue
        same_as = None if first.setdefault(param, name) == name else first[param]
        shown = value.detach() if isinstance(value, DTensor) else None
        found.append(StateEntry(name, shown, param.full_shape, param.handle.orig_dtype, param, same_as))
    return found


def shard_group(entries: list[StateEntry]) -> RankGroup:
    """Return the one shard group of all entries; a group of one rank if none is sharded.

    Raises:
        UnsupportedError: units are sharded over different groups.
    """
    rank_groups = {entry.param.rank_group for entry in entries if entry.param is not None}
    sharded = [rank_group for rank_group in rank_groups if rank_group.size > 1]
    if len(sharded) > 1:
        raise UnsupportedError(
            "The units of this model are sharded over different process groups, so no rank could receive all of it. "
            "Stream the parts one by one, or use SHARDED_STATE_DICT."
        )
    return sharded[0] if sharded else RankGroup(None, 0, 1)


def full_tensor_on(entry: StateEntry, dst: int | None, channels: P2PChannels) -> torch.Tensor | None:
    """Return the full tensor of an entry on rank ``dst`` of its shard group (None: on every rank), else None.

    Every rank of the shard group must call this. If tensor parallelism has split the parameter, every rank of the
    tensor-parallel group must call this too, and all of them get the tensor. ``channels`` serve any number of calls.
    """
    if entry.param is None:
        return None if entry.value is None else entry.value.clone()
    rank_group, adapter = entry.param.rank_group, entry.param.adapter
    shard = StateShard(entry.param, entry.held(), entry.param.shape)
    # An unsharded parameter is complete on every rank already.
    dst = dst if rank_group.size > 1 else None
    if isinstance(entry.value, DTensor):
        full = full_tensor(entry.value)
        return full if dst in (None, rank_group.rank) else None
    part = shard.local.new_empty(shard.shape) if dst in (None, rank_group.rank) else None
    redistribute([shard.transfer_to(dst, part)], channels)
    return None if part is None else adapter.full_tensor(adapter.from_local(part))


def iter_full_state_dict(
    model: nn.Module,
    *,
    dst: int | None = 0,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] | None = None,
    trainable_only: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Iterate over the full state dict as ``(name, full tensor)``, with one parameter in memory at a time.

    Every rank must iterate, with the same arguments. If a rank leaves the loop early, closing the iterator runs the
    remaining transfers (and drops their tensors), so that the other ranks do not hang.

    Args:
        model: a wrapped model, or a module that holds wrappers.
        dst: rank of the shard group that receives the tensors; the others get None instead. None: every rank.
        dtype: floating-point tensors are converted to it.
        keep: returns whether to yield the entry of a name; the same on every rank.
        trainable_only: yield only parameters with ``requires_grad``.

    Yields:
        Names in the order of ``state_dict()``; a new tensor on the parameters' device, or None for a managed
        parameter on ranks other than ``dst``. A tied parameter is yielded once for each of its names.

    Raises:
        OptionError: ``dst`` is not a rank of the shard group.
        UnsupportedError: units sharded over different groups, or an entry that is not a tensor.
        PhaseError: called in the middle of a step.
    """
    entries = entries_of(model, keep=keep, trainable_only=trainable_only)
    rank_group = shard_group(entries)
    if dst is not None and not 0 <= dst < rank_group.size and rank_group.size > 1:
        raise OptionError(f"dst must be a rank of the shard group, 0 to {rank_group.size - 1}, or None; got {dst!r}.")
    channels, position = P2PChannels(), 0
    try:
        for entry in entries:
            position += 1
            yield entry.name, _converted(full_tensor_on(entry, dst, channels), dtype)
    finally:
        for entry in entries[position:]:
            full_tensor_on(entry, dst, channels)


def _converted(value: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    if value is None or dtype is None or not value.is_floating_point():
        return value
    return value.to(dtype)
