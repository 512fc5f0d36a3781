"""Records the collectives of a step, and what its units do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.comm import torch_comm
from fsdp_flat.comm.shm import shared_channel, shared_collectives, transport_of
from fsdp_flat.comm.shm.transport import SharedMemoryTransport
from fsdp_flat.core import Unit, guards_in_use, step_of, units_of
from fsdp_flat.guards.once_a_tree import OnceATree
from tests.support.kit import mesh

STRATEGIES = list(ShardingStrategy)
SHARDED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


def mesh_for(strategy: ShardingStrategy) -> dict[str, Any]:
    """Return a ``device_mesh`` with two replicas for a hybrid strategy; nothing for other strategies."""
    if "HYBRID" not in strategy.name:
        return {}
    return {"device_mesh": mesh(2, dist.get_world_size() // 2)}


def traced(model: FSDP) -> list[tuple[str, str]]:
    """Start a trace of the model's units, and return it."""
    step = model._fsdp_step()
    step.trace = []
    return step.trace


def exchange_nbytes(model: nn.Module) -> int:
    """Return the bytes exchanged at the end of a backward: one per parameter and handle, three flags, and digests.

    A digest is there twice: one of all ranks, and one of each of several replicas that all-gather.
    """
    handles = [handle for unit in units_of(model) for handle in unit.param_groups]
    groups = units_of(model)[0].options.groups
    num_replicas = 0 if 1 in (groups.shard.size, groups.replicate.size) else groups.replicate.size
    num_params = sum(len(handle.layout.param_infos) for handle in handles)
    return num_params + len(handles) + 3 + 16 * (1 + num_replicas)


def units_by_name(model: nn.Module) -> dict[str, Unit]:
    return {unit.name: unit for unit in units_of(model)}


# -- collectives -----------------------------------------------------------------------------------------------------

OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
)
COLLECTIVES = (
    "broadcast",
    "all_reduce",
    "all_to_all_single",
    "all_to_all",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "barrier",
    "batch_isend_irecv",
    *OBJECT_COLLECTIVES,
)


# Purposes of messages through shared memory, which count once for each rank that reads them.
MESSAGES = ("gather", "reduction", "transfer")


@dataclass(frozen=True)
class Call:
    """Describes one collective and the bytes that this rank sends, by the cheapest algorithm."""

    name: str
    nbytes: int
    size: int
    is_source: bool

    @property
    def sent(self) -> float:
        """Return the minimum number of bytes that this rank sends."""
        others = self.size - 1
        if self.name == "broadcast":
            return self.nbytes * others if self.is_source else 0
        if self.name == "all_to_all_single":
            return self.nbytes
        if self.name in MESSAGES:
            return self.nbytes
        if self.name == "all_reduce":
            return 2 * self.nbytes * others / self.size
        raise AssertionError(f"no formula for {self.name}")


@dataclass
class Record:
    """Records the collectives of a block, in order."""

    calls: list[Call] = field(default_factory=list)
    on_call: Callable[[], None] = lambda: None

    def count(self, name: str) -> int:
        return sum(call.name == name for call in self.calls)

    def counts(self) -> dict[str, int]:
        return {name: self.count(name) for name in dict.fromkeys(call.name for call in self.calls)}

    def sent(self, name: str) -> float:
        return sum(call.sent for call in self.calls if call.name == name)


@contextmanager
def recorded(on_call: Callable[[], None] = lambda: None) -> Iterator[Record]:
    """Record every ``torch.distributed`` collective and every shared-memory message inside the block."""
    record = Record(on_call=on_call)
    originals: list[tuple[Any, str, Any]] = []
    places = [(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
    places += [(torch_comm, "all_gather_single"), (torch_comm, "reduce_scatter_single")]
    for owner, name in places:
        original = getattr(owner, name)
        originals.append((owner, name, original))
        setattr(owner, name, functools.partial(_note, record, name, original))
    send = SharedMemoryTransport.send
    originals.append((SharedMemoryTransport, "send", send))

    def note_and_send(
        transport: SharedMemoryTransport, purpose: str, tensors: Mapping[int, torch.Tensor], **whose: int
    ) -> None:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        record.calls.append(Call(purpose, nbytes, dist.get_world_size(), is_source=True))
        record.on_call()
        send(transport, purpose, tensors, **whose)

    SharedMemoryTransport.send = note_and_send  # type: ignore[method-assign]
    try:
        yield record
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def shared_memory(use: bool) -> Iterator[None]:
    """Make ranks behave inside the block as if they were on different hosts, if ``use`` is False."""
    if use:
        yield
        return
    with (
        mock.patch.object(shared_collectives, "connect", return_value=None),
        mock.patch.object(shared_channel, "transport_of", return_value=None),
    ):
        yield


def acquaint(model: nn.Module) -> None:
    """Set up the shared-memory transport, and skip the checks of the first step."""
    step = step_of(model, units_of(model)[0])
    for guard in guards_in_use():
        if isinstance(guard, OnceATree):
            guard.seen.add(step)
    for unit in units_of(model):
        if unit.needs_all_gather:
            transport_of(unit.options.groups.shard)


def _note(record: Record, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    tensor = args[1] if name == "all_to_all_single" else args[0] if args else None
    nbytes = tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
    group = kwargs.get("group")
    if name == "all_to_all_single":
        # A rank's share for itself is not sent.
        size = dist.get_world_size(group)
        splits = args[3] if len(args) > 3 else [tensor.numel() // size] * size
        nbytes -= splits[dist.get_group_rank(group or dist.group.WORLD, dist.get_rank())] * tensor.itemsize
    is_source = kwargs.get("src") == dist.get_rank()
    record.calls.append(Call(name, nbytes, dist.get_world_size(group), is_source))
    record.on_call()
    return original(*args, **kwargs)
