"""Registers handlers for optimizer states that are neither scalars nor shaped like the parameter, and merges these.

Adafactor keeps one number per row and one per column, 8-bit optimizers keep blocks. Only the optimizer's author can
define how a rank's part of such a state corresponds to its slice of the parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_flat.comm import ErrorTexts, RankGroup, agree, dtype_from_name, exchange_bytes
from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError
from fsdp_flat.layout import ReplicatedPartition
from fsdp_flat.runtime import units_of
from fsdp_flat.state.param_index import IndexedParam, rank_groups_of
from fsdp_flat.state.shards import TensorTransfer, redistribute

_ERROR_TEXTS = ErrorTexts(
    "merging optimizer states", "Ranks merge different states.", "Register the same handlers on every rank."
)

# A parameter and the name of one of its states.
Place = tuple[IndexedParam, str]


@dataclass(frozen=True, slots=True)
class StatePart:
    """Holds one rank's part of a state.

    Attributes:
        tensor: the state as the rank's optimizer keeps it, of any shape.
        start: first element of the rank's slice of the flattened parameter.
        stop: the element after its last; the slices of all ranks are contiguous.
    """

    tensor: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DeferredState:
    """Describes a merged state that is read only when it is split, so that no rank holds all of them at once.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read: reads and returns the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class OptimStateHandler:
    """Holds the functions that merge and split one state.

    Attributes:
        merge: ``merge(parts, shape)`` returns the tensor to save, made from every rank's part. ``parts`` are in the
            order of the slices, without ranks that hold no elements or no such state. ``shape`` is the parameter's.
        split: ``split(saved, shape, start, stop)`` returns the state of a rank's optimizer for the elements ``start``
            to ``stop`` of the flattened parameter.
    """

    merge: Callable[[Sequence[StatePart], torch.Size], torch.Tensor]
    split: Callable[[torch.Tensor, torch.Size, int, int], torch.Tensor]


def register_optim_state_handler(
    model: nn.Module,
    name: str,
    *,
    merge: Callable[[Sequence[StatePart], torch.Size], torch.Tensor],
    split: Callable[[torch.Tensor, torch.Size, int, int], torch.Tensor],
) -> None:
    """Register how to save and load an optimizer state that is neither a scalar nor shaped like its parameter.

    Without a handler, saving such a state is an error. With one, every optimizer state dict of ``model`` holds the
    full merged tensor under the state's name. One handler serves all parameters that have a state of this name. Needs
    ``use_orig_params=True`` or units of one parameter: the state of a flat parameter belongs to no single one.

    Every rank must register the same handlers.

    Args:
        model: a wrapped model, or a module that holds wrapped ones.
        name: the state's name in ``optimizer.state[param]``.
        merge: see :class:`OptimStateHandler`; must be pure, so that every rank gets the same result.
        split: the inverse of ``merge``.

    Raises:
        OptionTypeError: (a TypeError) ``merge`` or ``split`` is not callable, or ``name`` is not a string.
        OptionError: (a ValueError) nothing at or below ``model`` is wrapped.
    """
    if not isinstance(name, str) or not callable(merge) or not callable(split):
        raise OptionTypeError(f"A handler has a name and two functions; got {name!r}, {merge!r} and {split!r}.")
    units = units_of(model)
    if not units:
        raise OptionError(
            "register_optim_state_handler takes a wrapped model; nothing at or below this one is wrapped."
        )
    handler = OptimStateHandler(merge, split)
    for unit in units:
        unit.optim_state_handlers[name] = handler


def handler_of(param: IndexedParam, name: str) -> OptimStateHandler | None:
    """Return the handler of a state, or None."""
    handler = param.unit.optim_state_handlers.get(name)
    assert handler is None or isinstance(handler, OptimStateHandler)
    return handler


def refuse_split(param: IndexedParam, name: str) -> None:
    """Raise if tensor parallelism has split the parameter of a state that has a handler.

    Raises:
        UnsupportedError: the parameter is split.
    """
    if param.adapter.groups:
        raise UnsupportedError(
            f"State {name!r} of {param.fqn!r} (unit {param.unit.name!r}) has a handler, which is given local shards of "
            "a full parameter; tensor parallelism has split this one first. Leave the parameter out of tensor "
            "parallelism, or out of the optimizer that keeps such states."
        )


def merged_states(
    states: Sequence[tuple[Place, torch.Tensor | None]],
    dst_of: Callable[[int, int], int | None],
    *,
    offload: bool,
) -> dict[Place, torch.Tensor]:
    """Merge every state that has a handler on its destination rank, one after another.

    Every rank must call this with the same places in the same order.

    Args:
        states: at least one place, each with this rank's part, or None if only other ranks have the state.
        dst_of: given the position of a state among all and the size of its shard group, returns the destination rank
            in that group; None for every rank.
        offload: return merged states on the CPU.

    Raises:
        PeerFailureError: a handler raised on another rank.
    """
    own = [_own_part(param, tensor) for (param, _), tensor in states]
    kinds = _kinds_of([param for (param, _), _ in states], own)
    found: dict[Place, torch.Tensor] = {}
    error: Exception | None = None
    for position, ((param, name), _) in enumerate(states):
        rank_group = param.rank_group
        dst = dst_of(position, rank_group.size)
        parts = _gathered(param, own[position], kinds[position], dst)
        own[position] = None
        handler = handler_of(param, name)
        # A rank whose handler raises still takes part in the remaining exchanges, so that the others do not hang.
        if handler is not None and error is None and dst in (None, rank_group.rank):
            try:
                merged = handler.merge(parts, torch.Size(param.shape)).detach()
                found[param, name] = merged.to("cpu" if offload else merged.device, copy=True).contiguous()
            except Exception as raised:
                error = raised
    units = list(dict.fromkeys(param.unit for (param, _), _ in states))
    agree([], error, rank_groups_of(units), units[0].options.device, _ERROR_TEXTS)
    return found


def _own_part(param: IndexedParam, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or param.local_shard.is_empty:
        return None
    return tensor.detach().to(param.unit.options.device).contiguous()


def _kinds_of(
    params: Sequence[IndexedParam], own: Sequence[torch.Tensor | None]
) -> list[list[tuple[str, list[int]] | None]]:
    """Exchange dtype and shape of every rank's part of each state (by rank of its shard group), once per group."""
    by_rank_group: dict[RankGroup, list[int]] = {}
    for position, param in enumerate(params):
        by_rank_group.setdefault(param.rank_group, []).append(position)
    found: list[list[tuple[str, list[int]] | None]] = [[] for _ in own]
    for rank_group, positions in by_rank_group.items():
        mine = [own[position] for position in positions]
        text = json.dumps([None if part is None else (str(part.dtype), list(part.shape)) for part in mine]).encode()
        device = params[positions[0]].unit.options.device
        texts = [text] if rank_group.group is None else exchange_bytes(text, rank_group.group, device)
        rows = [json.loads(each) for each in texts]
        for at, position in enumerate(positions):
            found[position] = [row[at] for row in rows]
    return found


def _gathered(
    param: IndexedParam, own: torch.Tensor | None, kinds: Sequence[tuple[str, list[int]] | None], dst: int | None
) -> list[StatePart]:
    """Gather the parts of one state on rank ``dst`` of the shard group; for None, on every rank."""
    rank_group, runs, device = param.rank_group, param.partition, param.unit.options.device
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
        transfers.append(TensorTransfer(rank_group, device, held, wanted, source, target, numel * dtype.itemsize))
        if is_wanted:
            found.append(StatePart(part, runs[rank].start, runs[rank].stop))
    redistribute(transfers)
    return found
