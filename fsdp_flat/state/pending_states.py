"""Describes optimizer states that a load gets when it is committed: read from files, or sent by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fsdp_flat.api import ShardedOptimStateDictConfig
from fsdp_flat.comm import UntilRanksMeet, exchange_bytes
from fsdp_flat.core import PLAIN, Unit, local_of
from fsdp_flat.errors import PeerFailureError, UnsupportedError
from fsdp_flat.layout import Partition, ReplicatedPartition
from fsdp_flat.state.codecs import BOXES
from fsdp_flat.state.shards import (
    IndexedParam,
    PendingWrites,
    StateShard,
    TensorTransfer,
    check_rows,
    check_states,
    serialized,
    unpacked,
)
from fsdp_flat.state.torch_state import local_from

_LIVE = ShardedOptimStateDictConfig(offload_to_cpu=False, boxes=True)

# Reads tensors of an optimizer's states from files, by names of parameter and state.
ReadStates = Callable[[dict[str, dict[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class FromFiles:
    """Describes a tensor in the files of a checkpoint: each rank reads its part into the tensors of the optimizer.

    Attributes:
        place: the names of parameter and state in the files.
        read: reads tensors in their place.
        planned: those that a load reads together, once all of it is known to fit; the same for all states of the load.
    """

    shape: torch.Size
    dtype: torch.dtype
    place: tuple[str, str]
    read: ReadStates
    planned: dict[str, dict[str, torch.Tensor]]

    def plan_full(self, device: torch.device, writes: PendingWrites, then: Callable[[torch.Tensor], object]) -> None:
        """Plan a call of ``then`` with the full tensor, of which one at a time is read."""
        fqn, name = self.place

        def read() -> None:
            full = torch.zeros(self.shape, dtype=self.dtype)
            self.read({fqn: {name: full}})
            then(full)

        writes.call(read)

    def plan_shard(self, target: StateShard, writes: PendingWrites) -> None:
        """Plan how ``target`` gets its elements."""
        if target.owner is None:
            self._plan_read(BOXES.encode([target], _LIVE)[0], writes)
        elif not target.interval.is_empty:
            self._plan_read(target.local.view(target.shape), writes)

    def plan_unmanaged(self, made: torch.Tensor, _indexed: IndexedParam | None, writes: PendingWrites) -> None:
        """Plan how a tensor, or a DTensor, gets its elements."""
        self._plan_read(made, writes)

    def _plan_read(self, tensor: torch.Tensor, writes: PendingWrites) -> None:
        if not self.planned:
            writes.call(lambda: self.read(self.planned))
        fqn, name = self.place
        self.planned.setdefault(fqn, {})[name] = tensor


@dataclass(frozen=True, slots=True)
class FromRankZero:
    """Describes a tensor that only the first rank of a model's shard and replicate groups holds; None elsewhere."""

    shape: torch.Size
    dtype: torch.dtype
    tensor: torch.Tensor | None
    unit: Unit

    def plan_full(self, device: torch.device, writes: PendingWrites, then: Callable[[torch.Tensor], object]) -> None:
        """Plan how every rank gets the full tensor, and a call of ``then`` with it."""
        full = torch.empty(self.shape, dtype=self.dtype, device=device)
        self._plan_transfer(None, full.view(-1), writes)
        writes.call(partial(then, full), last=True)

    def plan_shard(self, target: StateShard, writes: PendingWrites) -> None:
        """Plan how ``target`` gets its elements."""
        local, adapter, interval = target.local, target.param.adapter, target.interval.to_slice()
        if adapter is PLAIN and target.param.unit.options.groups.rank_groups == self.unit.options.groups.rank_groups:
            self._plan_transfer(target.held, local, writes)
        else:
            part_of = adapter.local_slice
            self.plan_full(local.device, writes, lambda full: local.copy_(part_of(full).reshape(-1)[interval]))

    def plan_unmanaged(self, made: torch.Tensor, indexed: IndexedParam | None, writes: PendingWrites) -> None:
        """Plan how a tensor, or a DTensor sharded as a parameter is, gets its elements."""
        if indexed is None:
            self._plan_transfer(None, made.view(-1), writes)
        else:
            local = local_of(made)
            self.plan_full(indexed.unit.options.device, writes, lambda full: local.copy_(local_from(indexed, full)))

    def _plan_transfer(self, wanted: Partition | None, target: torch.Tensor, writes: PendingWrites) -> None:
        """Plan how every rank gets its elements, all of them by default."""
        groups, device, numel = self.unit.options.groups, self.unit.options.device, self.shape.numel()
        shard, replicate, first, second = groups.shard, groups.replicate, None, None
        if replicate.rank == 0:
            source = None if self.tensor is None else self.tensor.detach().reshape(-1)
            held, nbytes = ReplicatedPartition(numel, 0, shard.size), numel * self.dtype.itemsize
            wanted = wanted or ReplicatedPartition(numel, None, shard.size)
            first = TensorTransfer(shard, held, wanted, source, target, device, nbytes)
        if replicate.size > 1:
            # Each rank of the first shard group has its part now; send them to the other replicas.
            held, wanted = (ReplicatedPartition(target.numel(), dst, replicate.size) for dst in (0, None))
            source, received = (None, target) if replicate.rank else (target, None)
            second = TensorTransfer(replicate, held, wanted, source, received, device, target.nbytes)
        writes.transfer(first, second)


PendingTensor = FromFiles | FromRankZero


def shared_from_rank_zero(unit: Unit, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Broadcast rank 0's ``given`` over the groups of ``unit``, with :class:`FromRankZero` in place of its tensors.

    Every rank must call this; an error of rank 0 is raised on all.
    """
    groups = unit.options.groups
    if groups.num_ranks == 1:
        return dict(given or {})
    is_first = not any(rank_group.rank for rank_group in groups.rank_groups)
    until_met, payload = UntilRanksMeet(), b""
    with until_met:
        payload = serialized(_without_data(given)) if is_first else b""
    if (error := until_met.error) is not None:
        payload = serialized({"error": f"{type(error).__name__}: {error}"})
    for rank_group in groups.rank_groups:
        payload = exchange_bytes(payload, rank_group)[0]
    if error is not None:
        raise error
    described = unpacked(payload)
    if "error" in described:
        raise PeerFailureError(f"Rank 0 of the group cannot share its optimizer state dict: {described['error']}")
    own = given["state"] if given and is_first else None
    for name, row in described["state"].items():
        for key, value in row.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                row[key] = FromRankZero(value.shape, value.dtype, own[name][key] if own else None, unit)
    return dict(described)


def _without_data(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state dict with a tensor on the meta device in place of each state that has dims."""
    given = check_states(given)
    check_rows(given["state"])
    state: dict[str, dict[str, Any]] = {}
    for name, row in given["state"].items():
        state[name] = {}
        for key, value in row.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name][key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            else:
                state[name][key] = _plain(value, f"State {key!r} of {name!r}")
    described: dict[str, Any] = {"state": state}
    if given.get("param_groups") is not None:
        described["param_groups"] = [
            {key: _plain(value, f"Setting {key!r} of a parameter group") for key, value in group.items()}
            for group in given["param_groups"]
        ]
    return described


def _plain(value: Any, what: str) -> Any:
    """Return a plain value, of exactly its plain type, which ``weights_only`` accepts; raise for others."""
    if isinstance(value, (list, tuple)):
        entries = [_plain(entry, what) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    if isinstance(value, torch.Tensor) and not value.dim():
        # A clone, since all of a view's storage would be sent.
        return value.detach().cpu().clone()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UnsupportedError(
        f"{what} is a {type(value).__name__}, which cannot be sent to other ranks. Load the dict on every rank and use "
        "rank0_only=False."
    )
