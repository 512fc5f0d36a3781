"""Distributes rank 0's full optimizer state dict: broadcasts its description, so that tensors can be sent as shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_flat.comm import ShardingGroups, dtype_from_name, exchange_bytes
from fsdp_flat.errors import PeerFailureError, UnsupportedError, UsageError
from fsdp_flat.flat import PLAIN
from fsdp_flat.layout import Partition, ReplicatedPartition
from fsdp_flat.runtime import Unit
from fsdp_flat.state.shards import LoadPlan, StateShard, TensorTransfer


@dataclass(frozen=True, slots=True)
class FromRankZero:
    """Describes a tensor that only the first rank of a model's groups holds.

    Attributes:
        tensor: the tensor on the first rank, None elsewhere.
        shape: its shape.
        dtype: its dtype.
        groups: the model's shard and replicate groups.
        device: the compute device.
    """

    tensor: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    groups: ShardingGroups
    device: torch.device

    def plan_scatter(self, target: StateShard, plan: LoadPlan) -> None:
        """Plan how every rank gets its part."""
        adapter, run = target.param.adapter, target.run.to_slice()
        if adapter is PLAIN:
            self._plan_transfer(target.held, target.local, plan)
        else:
            self.plan_broadcast(
                target.local.device, plan, lambda full: target.local.copy_(adapter.local_slice(full).reshape(-1)[run])
            )

    def plan_broadcast(
        self, device: torch.device, plan: LoadPlan, then: Callable[[torch.Tensor], object] | None = None
    ) -> torch.Tensor:
        """Plan how every rank gets the full tensor, which is returned, and given to ``then`` once it is there."""
        full = torch.empty(self.shape, dtype=self.dtype, device=device)
        self._plan_transfer(ReplicatedPartition(full.numel(), None, self.groups.shard.size), full.view(-1), plan)
        if then is not None:
            plan.call(lambda: then(full), last=True)
        return full

    def _plan_transfer(self, wanted: Partition, target: torch.Tensor, plan: LoadPlan) -> None:
        shard, replicate, first, second = self.groups.shard, self.groups.replicate, None, None
        numel = self.shape.numel()
        if replicate.rank == 0:
            source = None if self.tensor is None else self.tensor.detach().reshape(-1)
            held, nbytes = ReplicatedPartition(numel, 0, shard.size), numel * self.dtype.itemsize
            first = TensorTransfer(shard, self.device, held, wanted, source, target, nbytes)
        if replicate.size > 1:
            # Each rank of the first shard group has its part now; send them to the other replicas.
            held = ReplicatedPartition(target.numel(), 0, replicate.size)
            wanted = ReplicatedPartition(target.numel(), None, replicate.size)
            source, received = (None, target) if replicate.rank else (target, None)
            second = TensorTransfer(replicate, self.device, held, wanted, source, received, target.nbytes)
        plan.transfer(first, second)


def shared_from_rank_zero(unit: Unit, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Broadcast rank 0's ``given`` over the groups of ``unit``, with :class:`FromRankZero` in place of its tensors.

    Every rank must call this.

    Raises:
        UsageError: rank 0 has no optimizer state dict.
        UnsupportedError: rank 0 has a value that cannot be encoded.
        PeerFailureError: rank 0 raised one of these.
    """
    groups, device = unit.options.groups, unit.options.device
    if groups.num_ranks == 1:
        return dict(given or {})
    is_first = not any(rank_group.rank for rank_group in groups.rank_groups)
    error: Exception | None = None
    payload = b""
    if is_first:
        try:
            payload = json.dumps({"given": _described(given)}).encode()
        except Exception as found:
            error = found
            payload = json.dumps({"error": f"{type(found).__name__}: {found}"}).encode()
    for rank_group in groups.rank_groups:
        if rank_group.group is not None:
            payload = exchange_bytes(payload, rank_group.group, device)[0]
    described = json.loads(payload)
    if error is not None:
        raise error
    if "error" in described:
        raise PeerFailureError(f"Rank 0 of the group cannot share its optimizer state dict: {described['error']}")
    state = {
        name: {
            key: _decoded(value, given["state"][name][key] if given is not None and is_first else None, unit)
            for key, value in row.items()
        }
        for name, row in described["given"]["state"].items()
    }
    settings = described["given"]["param_groups"]
    if settings is None:
        return {"state": state}
    decoded = [{key: _decoded(value, None, unit) for key, value in group.items()} for group in settings]
    return {"state": state, "param_groups": decoded}


def _described(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if not given or "state" not in given:
        has = "nothing" if not given else sorted(map(str, given))
        raise UsageError(f"An optimizer state dict has 'state' and mostly 'param_groups'; rank 0 has {has}.")
    state = {
        name: {key: _encoded(value, f"State {key!r} of {name!r}", tensors=True) for key, value in row.items()}
        for name, row in given["state"].items()
    }
    groups = given.get("param_groups")
    if groups is not None:
        groups = [
            {key: _encoded(value, f"Setting {key!r} of a parameter group") for key, value in group.items()}
            for group in groups
        ]
    return {"state": state, "param_groups": groups}


def _encoded(value: Any, what: str, *, tensors: bool = False) -> list[Any]:
    """Encode a value as JSON, which has neither tensors nor tuples (Adam's betas)."""
    if isinstance(value, torch.Tensor) and value.dim() and tensors:
        return ["tensor", str(value.dtype), list(value.shape)]
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return ["scalar", str(value.dtype), value.item()]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", [_encoded(entry, what) for entry in value]]
    if isinstance(value, (int, float, str, bool, type(None))):
        return ["value", value]
    raise UnsupportedError(
        f"{what} is a {type(value).__name__}, which cannot be sent to other ranks. Load the dict on every rank and use "
        "rank0_only=False."
    )


def _decoded(encoded: list[Any], own: torch.Tensor | None, unit: Unit) -> Any:
    kind, *rest = encoded
    if kind == "value":
        return rest[0]
    if kind in ("list", "tuple"):
        values = [_decoded(entry, None, unit) for entry in rest[0]]
        return values if kind == "list" else tuple(values)
    dtype = dtype_from_name(rest[0])
    if kind == "scalar":
        return torch.tensor(rest[1], dtype=dtype)
    return FromRankZero(own, torch.Size(rest[1]), dtype, unit.options.groups, unit.options.device)
