"""Merges the parts of all ranks of each optimizer state that has a handler."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from fsdp_flat.comm import RankGroup, Transfers, dtype_from_name, exchange_bytes
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import ReplicatedPartition, plan_transfer
from fsdp_flat.runtime import ErrorTexts, Unit, agree
from fsdp_flat.state.common import rank_groups_of
from fsdp_flat.state.handle_states import HandleStates
from fsdp_flat.state.handlers import OptimStateHandler, StatePart
from fsdp_flat.state.optim_params import ParamNames

__all__ = ["Place", "dst_all", "dst_rank_zero", "dst_round_robin", "merged_states"]

# A handle, a parameter of it and the name of a state.
Place = tuple[FlatParamHandle, int, str]

_ERROR_TEXTS = ErrorTexts(
    "merging optimizer states", "Ranks merge different states.", "Register the same handlers on every rank."
)


def dst_all(_position: int, _size: int) -> int | None:
    """Select every rank to receive a merged state."""
    return None


def dst_rank_zero(_position: int, _size: int) -> int | None:
    """Select rank 0 of the shard group to receive a merged state."""
    return 0


def dst_round_robin(position: int, size: int) -> int | None:
    """Select the ranks of the shard group in turn to receive a merged state."""
    return position % size


def merged_states(
    names: ParamNames,
    states: dict[FlatParamHandle, HandleStates],
    dst_of: Callable[[int, int], int | None],
    *,
    offload: bool,
) -> dict[Place, torch.Tensor]:
    """Merge every state that has a handler on its destination rank, one after another.

    Every rank must call this, with states that :func:`agree_on_states` has completed.

    Args:
        names: the model's names.
        states: this rank's states.
        dst_of: :func:`dst_all`, :func:`dst_rank_zero` or :func:`dst_round_robin`: given the position of a state among
            all and the size of its shard group, returns the destination rank in that group; None for every rank.
        offload: return merged states on the CPU.

    Raises:
        PeerFailureError: a handler raised on another rank.
    """
    todo = [
        (unit, handle, index, name, tensor)
        for unit, handle, _ in names.handles
        for index, row in enumerate(states[handle].custom_handled)
        for name, tensor in row.items()
    ]
    own = [_own_part(handle, index, tensor) for _, handle, index, _, tensor in todo]
    kinds = _described([unit for unit, *_ in todo], own)
    found: dict[Place, torch.Tensor] = {}
    error: Exception | None = None
    for position, (unit, handle, index, name, _) in enumerate(todo):
        rank_group = unit.options.groups.shard
        dst = dst_of(position, rank_group.size)
        parts = _gathered(unit, handle, index, own[position], kinds[position], dst)
        own[position] = None
        handler = unit.optim_state_handlers[name]
        assert isinstance(handler, OptimStateHandler)
        # A rank whose handler raises still takes part in the remaining exchanges, so that the others do not hang.
        if error is None and dst in (None, rank_group.rank):
            try:
                whole = handler.merge(parts, torch.Size(handle.layout.param_infos[index].shape)).detach()
                found[handle, index, name] = whole.to("cpu" if offload else whole.device, copy=True).contiguous()
            except Exception as raised:
                error = raised
    if todo:
        units = list(dict.fromkeys(unit for unit, *_ in todo))
        agree([], error, rank_groups_of(units), units[0].options.device, _ERROR_TEXTS)
    return found


def _own_part(handle: FlatParamHandle, index: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or handle.views.local_shards[index].is_empty:
        return None
    return tensor.detach().to(handle.spec.device).contiguous()


def _described(units: list[Unit], own: list[torch.Tensor | None]) -> list[list[tuple[str, list[int]] | None]]:
    """Exchange dtype and shape of every rank's part of each state (by rank of its shard group), once per group."""
    by_rank_group: dict[RankGroup, list[int]] = {}
    for position, unit in enumerate(units):
        by_rank_group.setdefault(unit.options.groups.shard, []).append(position)
    found: list[list[tuple[str, list[int]] | None]] = [[] for _ in own]
    for rank_group, positions in by_rank_group.items():
        mine = [own[position] for position in positions]
        text = json.dumps([None if part is None else (str(part.dtype), list(part.shape)) for part in mine])
        device = units[positions[0]].options.device
        texts = [text.encode()] if rank_group.group is None else exchange_bytes(text.encode(), rank_group.group, device)
        rows = [json.loads(each) for each in texts]
        for at, position in enumerate(positions):
            found[position] = [row[at] for row in rows]
    return found


def _gathered(
    unit: Unit,
    handle: FlatParamHandle,
    index: int,
    own: torch.Tensor | None,
    kinds: list[tuple[str, list[int]] | None],
    dst: int | None,
) -> list[StatePart]:
    """Gather the parts of one state on rank ``dst`` of the shard group; for None, on every rank."""
    rank_group, local_shards, device = unit.options.groups.shard, handle.layout.partition(index), unit.options.device
    channels = Transfers(rank_group, device)
    found = []
    for rank, kind in enumerate(kinds):
        if kind is None:
            continue
        is_own, is_wanted = rank == rank_group.rank, dst in (None, rank_group.rank)
        part = (
            own if is_own else torch.empty(kind[1] if is_wanted else 0, dtype=dtype_from_name(kind[0]), device=device)
        )
        assert part is not None
        numel = torch.Size(kind[1]).numel()
        transfer_plan = plan_transfer(
            ReplicatedPartition(numel, rank, rank_group.size),
            ReplicatedPartition(numel, dst, rank_group.size),
            rank_group.rank,
        )
        # This rank's own part is not copied to itself.
        channels.add(
            transfer_plan, part.view(-1) if is_own else None, part.view(-1) if is_wanted and not is_own else None
        )
        if is_wanted:
            found.append(StatePart(part, local_shards[rank].start, local_shards[rank].stop))
    channels.wait()
    return found
