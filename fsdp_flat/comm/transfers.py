"""Transfers runs of elements between ranks, each directly from its source to its target tensor.

State dicts use these transfers: no tensor is all-gathered or sliced afterwards, so a save needs only the memory of its
result and moves each element once. Only short runs, for which a message costs more than a copy, are packed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm.rank_groups import RankGroup, moves_by_gloo
from fsdp_flat.comm.shm import SharedMemoryChannel, TransportQueue, transport_of
from fsdp_flat.layout import TransferPlan

# The best threshold depends on the network; sender and receiver only have to use the same one.
_SHORT_NBYTES = 1 << 16
# Packed runs take memory until they are unpacked, so the bytes in flight are limited.
_MAX_IN_FLIGHT_NBYTES = 1 << 26


class Transfers:
    """Executes transfer plans by p2p messages in one group.

    Every rank of the group must add the same tensors in the same order; between two ranks, runs arrive in the order
    in which they were added.

    Args:
        rank_group: the ranks.
        device: the compute device, on which the group communicates; other tensors are copied through it.
        queue: the queue shared with transfers in other groups at the same time; None if there are none.
    """

    def __init__(self, rank_group: RankGroup, device: torch.device, queue: TransportQueue | None = None) -> None:
        self._channel = _channel_for(rank_group, device, TransportQueue() if queue is None else queue)
        self._after: list[Callable[[], object]] = []
        self._short_sends: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._short_receives: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def add(self, transfer_plan: TransferPlan, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Begin to transfer one tensor.

        Args:
            transfer_plan: this rank's plan.
            source: 1-D, the elements that this rank holds; None if it sends and keeps nothing.
            target: 1-D, receives this rank's elements, of the sources' dtype; None if it receives and keeps nothing.
        """
        if transfer_plan.kept is not None and source is not None and target is not None:
            target[transfer_plan.kept[1]].copy_(source[transfer_plan.kept[0]])
        for rank, run in transfer_plan.receives:
            assert target is not None
            if not _is_packed(target[run], (rank,), self._short_receives):
                self._receive(target[run], rank)
        by_run: dict[tuple[int, int], list[int]] = {}
        for rank, run in transfer_plan.sends:
            by_run.setdefault((run.start, run.stop), []).append(rank)
        for (start, stop), ranks in by_run.items():
            assert source is not None
            if not _is_packed(source[start:stop], ranks, self._short_sends):
                self._send(source[start:stop].contiguous(), ranks)

    def wait(self) -> None:
        """Block until all added tensors have been transferred, to this rank and from it."""
        for (rank, _), runs in self._short_receives.items():
            packed = torch.empty(sum(run.numel() for run in runs), dtype=runs[0].dtype, device=runs[0].device)
            self._receive(packed, rank)
            self._after.append(partial(_unpack, packed, runs))
        for (rank, _), runs in self._short_sends.items():
            self._send(torch.cat(runs), [rank])
        self._channel.wait()
        for finish in self._after:
            finish()
        self._after = []
        self._short_sends, self._short_receives = {}, {}

    def _send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        self._channel.send(run.to(self._channel.device), to)

    def _receive(self, run: torch.Tensor, source: int) -> None:
        target = run
        if run.device.type != self._channel.device.type:
            run = torch.empty_like(run, device=self._channel.device)
            self._after.append(lambda: target.copy_(run))
        self._channel.receive(run, source)


def _is_packed(
    run: torch.Tensor, ranks: Sequence[int], short: dict[tuple[int, torch.dtype], list[torch.Tensor]]
) -> bool:
    """Add a short run to those of its rank and dtype, and return whether it is short.

    Sender and receiver compute the same result.
    """
    if run.nbytes >= _SHORT_NBYTES:
        return False
    for rank in ranks:
        short.setdefault((rank, run.dtype), []).append(run)
    return True


class _P2PChannel(Protocol):
    """Describes a p2p channel between the ranks of a group.

    Attributes:
        device: device of the runs that it transfers.
    """

    device: torch.device

    def send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        """Begin to send ``run`` to each rank of ``to``."""
        ...

    def receive(self, run: torch.Tensor, source: int) -> None:
        """Begin to receive into ``run`` from rank ``source``."""
        ...

    def wait(self) -> None:
        """Block until all runs are received and the sent tensors are no longer in use."""
        ...


class _GroupChannel:
    """Uses the process group's p2p operations, begun one by one (gloo) or as one batch for other backends.

    A single rank has no group and nothing to transfer.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, at_once: bool) -> None:
        self.device = device
        self._group = group
        self._at_once = at_once
        self._works: list[Any] = []
        self._batch: list[dist.P2POp] = []
        self._alive: list[torch.Tensor] = []

    def send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        self._alive.append(run)
        for rank in to:
            self._begin(dist.isend, run, rank)

    def receive(self, run: torch.Tensor, source: int) -> None:
        self._begin(dist.irecv, run, source)

    def _begin(self, operation: Callable[..., Any], run: torch.Tensor, rank: int) -> None:
        assert self._group is not None
        peer = dist.get_global_rank(self._group, rank)
        if self._at_once:
            self._works.append(operation(run, peer, group=self._group))
        else:
            self._batch.append(dist.P2POp(operation, run, peer, self._group))

    def wait(self) -> None:
        if self._batch:
            self._works.extend(dist.batch_isend_irecv(self._batch))
        for work in self._works:
            work.wait()
        self._works, self._batch, self._alive = [], [], []


def _channel_for(rank_group: RankGroup, device: torch.device, queue: TransportQueue) -> _P2PChannel:
    group = rank_group.group
    if group is None or not moves_by_gloo(group, device):
        return _GroupChannel(group, device, at_once=False)
    # gloo sends CPU tensors only.
    transport = transport_of(rank_group) if rank_group.size > 1 else None
    return (
        _GroupChannel(group, torch.device("cpu"), at_once=True)
        if transport is None
        else SharedMemoryChannel(transport, queue)
    )


class P2PChannels:
    """Executes transfer plans in several groups concurrently, within a memory limit.

    Every rank of the groups must add the same tensors in the same order.
    """

    def __init__(self) -> None:
        self._by_rank_group: dict[RankGroup, Transfers] = {}
        self._queue = TransportQueue()
        self._nbytes_under_way = 0

    def add(
        self,
        rank_group: RankGroup,
        device: torch.device,
        transfer_plan: TransferPlan,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        nbytes: int,
    ) -> None:
        """Begin to transfer one tensor, after waiting for earlier ones if too many bytes are in flight.

        Args:
            rank_group: the ranks.
            device: the compute device.
            transfer_plan, source, target: see :meth:`Transfers.add`.
            nbytes: bytes of the full tensor, equal on every rank.
        """
        if self._nbytes_under_way + nbytes > _MAX_IN_FLIGHT_NBYTES:
            self.wait()
        self._nbytes_under_way += nbytes
        if rank_group not in self._by_rank_group:
            self._by_rank_group[rank_group] = Transfers(rank_group, device, self._queue)
        self._by_rank_group[rank_group].add(transfer_plan, source, target)

    def wait(self) -> None:
        """Block until all added tensors have been transferred."""
        for transfers in self._by_rank_group.values():
            transfers.wait()
        self._nbytes_under_way = 0


def _unpack(packed: torch.Tensor, runs: list[torch.Tensor]) -> None:
    for run, part in zip(runs, packed.split([run.numel() for run in runs]), strict=True):
        run.copy_(part)
