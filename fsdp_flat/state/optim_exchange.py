"""Exchanges optimizer states of other forms than shards between ranks.

States that are neither scalars nor shaped like the parameter have handlers: Adafactor keeps one number per row and one
per column, 8-bit optimizers keep blocks, and only the optimizer's author can define how a rank's part of such a state
corresponds to its slice of the parameter. A state dict that rank 0 alone has is distributed by a description of it, so
that tensors can be sent as shards.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_flat.comm import ErrorTexts, RankGroup, agree, dtype_from_name, exchange_bytes
from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError, UsageError
from fsdp_flat.flat import PLAIN
from fsdp_flat.layout import Partition, ReplicatedPartition
from fsdp_flat.runtime import Unit, units_of
from fsdp_flat.state.shards import IndexedParam, LoadPlan, StateShard, TensorTransfer, rank_groups_of, redistribute

_MERGING = ErrorTexts("merging optimizer states")
_SHARING = ErrorTexts("sharing its optimizer state dict")

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


def refuse_split(param: IndexedParam, name: str) -> None:
    """Raise an UnsupportedError if tensor parallelism has split the parameter of a state that has a handler."""
    if param.adapter.groups:
        raise UnsupportedError(
            f"State {name!r} of {param.fqn!r} (unit {param.unit.name!r}) has a handler, which is given local shards of "
            "a full parameter; tensor parallelism has split this one first. Leave the parameter out of tensor "
            "parallelism, or out of the optimizer that keeps such states."
        )


def merged_states(
    states: Mapping[Place, torch.Tensor | None], *, rank0_only: bool, in_turn: bool, offload: bool
) -> dict[Place, torch.Tensor]:
    """Merge every state that has a handler: each for rank 0 of its shard group, for one rank in turn, or for all ranks.

    ``states`` has this rank's part by place, None if only other ranks have the state. Every rank must call this with
    the same places in the same order.
    """
    if not states:
        return {}
    own: dict[Place, torch.Tensor | None] = {}
    by_rank_group: dict[RankGroup, list[Place]] = {}
    for (param, name), tensor in states.items():
        part = None if tensor is None or param.local_shard.is_empty else tensor.detach()
        own[param, name] = None if part is None else part.to(param.unit.options.device).contiguous()
        by_rank_group.setdefault(param.rank_group, []).append((param, name))
    found: dict[Place, torch.Tensor] = {}
    error: Exception | None = None
    units = list(dict.fromkeys(param.unit for param, _ in states))
    for rank_group, places in by_rank_group.items():
        kinds = [None if (part := own[place]) is None else (str(part.dtype), list(part.shape)) for place in places]
        text, device = json.dumps(kinds).encode(), units[0].options.device
        texts = [text] if rank_group.group is None else exchange_bytes(text, rank_group.group, device)
        for position, ((param, name), *each_kind) in enumerate(zip(places, *map(json.loads, texts), strict=True)):
            dst = 0 if rank0_only else position % rank_group.size if in_turn else None
            parts = _gathered(param, own.pop((param, name)), each_kind, dst)
            handler = param.unit.optim_state_handlers.get(name)
            # A rank whose handler raises still takes part in the remaining exchanges, so that the others do not hang.
            if handler is not None and error is None and dst in (None, rank_group.rank):
                try:
                    merged = handler.merge(parts, torch.Size(param.shape)).detach()
                    found[param, name] = merged.to("cpu" if offload else merged.device, copy=True).contiguous()
                except Exception as raised:
                    error = raised
    agree([], error, rank_groups_of(units), units[0].options.device, _MERGING)
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


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """Describes a full tensor that this rank gets when a load is committed."""

    shape: torch.Size
    dtype: torch.dtype

    def plan_full(self, device: torch.device, plan: LoadPlan, then: Callable[[torch.Tensor], object]) -> None:
        """Plan a call of ``then`` with the full tensor."""
        raise NotImplementedError

    def plan_shard(self, target: StateShard, plan: LoadPlan) -> None:
        """Plan how ``target`` gets its elements."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DeferredState(PendingTensor):
    """Describes a state that is read only when it is needed, so that no rank holds all of them at once."""

    read: Callable[[], torch.Tensor]

    def plan_full(self, device: torch.device, plan: LoadPlan, then: Callable[[torch.Tensor], object]) -> None:
        plan.call(lambda: then(self.read()))

    def plan_shard(self, target: StateShard, plan: LoadPlan) -> None:
        if not target.run.is_empty:
            plan.call(lambda: target.local.copy_(self.read().reshape(-1)))


@dataclass(frozen=True, slots=True)
class FromRankZero(PendingTensor):
    """Describes a tensor that only the first rank of a model's shard and replicate groups holds; None elsewhere."""

    tensor: torch.Tensor | None
    unit: Unit

    def plan_full(self, device: torch.device, plan: LoadPlan, then: Callable[[torch.Tensor], object]) -> None:
        full = torch.empty(self.shape, dtype=self.dtype, device=device)
        wanted = ReplicatedPartition(full.numel(), None, self.unit.options.groups.shard.size)
        self._plan_transfer(wanted, full.view(-1), plan)
        plan.call(lambda: then(full), last=True)

    def plan_shard(self, target: StateShard, plan: LoadPlan) -> None:
        local, adapter, run = target.local, target.param.adapter, target.run.to_slice()
        if adapter is PLAIN and target.param.unit.options.groups.rank_groups == self.unit.options.groups.rank_groups:
            self._plan_transfer(target.held, local, plan)
        else:
            self.plan_full(local.device, plan, lambda full: local.copy_(adapter.local_slice(full).reshape(-1)[run]))

    def _plan_transfer(self, wanted: Partition, target: torch.Tensor, plan: LoadPlan) -> None:
        groups, device, numel = self.unit.options.groups, self.unit.options.device, self.shape.numel()
        shard, replicate, first, second = groups.shard, groups.replicate, None, None
        if replicate.rank == 0:
            source = None if self.tensor is None else self.tensor.detach().reshape(-1)
            held, nbytes = ReplicatedPartition(numel, 0, shard.size), numel * self.dtype.itemsize
            first = TensorTransfer(shard, device, held, wanted, source, target, nbytes)
        if replicate.size > 1:
            # Each rank of the first shard group has its part now; send them to the other replicas.
            held, wanted = (ReplicatedPartition(target.numel(), dst, replicate.size) for dst in (0, None))
            source, received = (None, target) if replicate.rank else (target, None)
            second = TensorTransfer(replicate, device, held, wanted, source, received, target.nbytes)
        plan.transfer(first, second)


def shared_from_rank_zero(unit: Unit, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Broadcast rank 0's ``given`` over the groups of ``unit``, with :class:`FromRankZero` in place of its tensors.

    Every rank must call this; an error of rank 0 is raised on all.
    """
    groups, device = unit.options.groups, unit.options.device
    if groups.num_ranks == 1:
        return dict(given or {})
    is_first = not any(rank_group.rank for rank_group in groups.rank_groups)
    error: Exception | None = None
    payload = b""
    try:
        payload = _described(given) if is_first else b""
    except Exception as raised:
        error = raised
    agree([], error, groups.rank_groups, device, _SHARING)
    for rank_group in groups.rank_groups:
        if rank_group.group is not None:
            payload = exchange_bytes(payload, rank_group.group, device)[0]
    described = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)
    own = given["state"] if given and is_first else None
    for name, row in described["state"].items():
        for key, value in row.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                row[key] = FromRankZero(value.shape, value.dtype, own[name][key] if own else None, unit)
    return dict(described)


def _described(given: Mapping[str, Any] | None) -> bytes:
    """Serialize a state dict with a tensor on the meta device in place of each state that has dims."""
    if not given or "state" not in given:
        has = "nothing" if not given else sorted(map(str, given))
        raise UsageError(f"An optimizer state dict has 'state' and mostly 'param_groups'; rank 0 has {has}.")
    state: dict[str, dict[str, Any]] = {}
    for name, row in given["state"].items():
        state[name] = {}
        for key, value in row.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name][key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            else:
                state[name][key] = _checked(value, f"State {key!r} of {name!r}")
    described: dict[str, Any] = {"state": state}
    if given.get("param_groups") is not None:
        described["param_groups"] = [
            {key: _checked(value, f"Setting {key!r} of a parameter group") for key, value in group.items()}
            for group in given["param_groups"]
        ]
    buffer = io.BytesIO()
    torch.save(described, buffer)
    return buffer.getvalue()


def _checked(value: Any, what: str) -> Any:
    """Return a plain value; raise for others."""
    if isinstance(value, (list, tuple)):
        entries = [_checked(entry, what) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    if isinstance(value, (int, float, str, type(None))) or (isinstance(value, torch.Tensor) and not value.dim()):
        return value
    raise UnsupportedError(
        f"{what} is a {type(value).__name__}, which cannot be sent to other ranks. Load the dict on every rank and use "
        "rank0_only=False."
    )


class Peers(Protocol):
    """Exchanges values with all ``ranks`` of a model, which are global."""

    ranks: list[int]

    def integers(self, values: list[int], error: Exception | None) -> list[list[int]]:
        """All-gather integers, as many on every rank, in one collective; raise on all ranks if one has an error."""

    def texts(self, text: str) -> list[str]:
        """All-gather texts."""


def plain_to_json(value: Any) -> list[Any]:
    """Encode a non-tensor state, equal on every rank for equal values; pickled if JSON lacks the type."""
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return [str(value.dtype), value.item()]
    if type(value) in (int, float, str, bool, type(None)):
        return ["", value]
    return ["pickle", base64.b64encode(pickle.dumps(value)).decode()]


def plain_from_json(kind: str, value: Any) -> Any:
    """Decode a value that :func:`plain_to_json` encoded on a rank of the same job."""
    if kind == "pickle":
        return pickle.loads(base64.b64decode(value))
    return torch.tensor(value, dtype=dtype_from_name(kind)) if kind else value
