"""Transfers runs of elements between ranks, each directly from its source to its target tensor.

State dicts use these transfers: no tensor is all-gathered or sliced afterwards, so a save needs only the memory of its
result and moves each element once. Only short runs, for which a message costs more than a copy, are packed together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm.rank_groups import RankGroup, moves_by_gloo
from fsdp_flat.comm.shm import Message, SharedMemoryTransport, transport_of, wait_for
from fsdp_flat.layout import TransferPlan

# The best threshold depends on the network; sender and receiver only have to use the same one.
_SHORT_NBYTES = 1 << 16
# Packed runs take memory until they are unpacked, so the bytes in flight are limited.
_MAX_IN_FLIGHT_NBYTES = 1 << 26
# Long runs are sent through shared memory in parts, several of them unread, so that neither side waits for each part.
_PART_NBYTES = 1 << 22
_MOST_UNREAD_NBYTES = 1 << 24


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
        """Begin to transfer one tensor as :meth:`Transfers.add` does, of ``nbytes`` in full, equal on every rank.

        Waits for earlier ones if too many bytes are in flight.
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


class Transfers:
    """Executes transfer plans by p2p messages in one group.

    Every rank of the group must add the same tensors in the same order; between two ranks, runs arrive in the order
    in which they were added. The group communicates on ``device``; other tensors are copied through it.
    """

    def __init__(self, rank_group: RankGroup, device: torch.device, queue: TransportQueue) -> None:
        self._channel = _channel_for(rank_group, device, queue)
        # Targets of received runs that are packed together, or on another device than the channel.
        self._copies: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._short_sends: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._short_receives: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def add(self, transfer_plan: TransferPlan, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Begin to transfer one tensor.

        ``source`` (1-D) has the elements that this rank holds; None if it sends and keeps nothing. ``target`` (1-D, of
        the sources' dtype) receives elements; None if this rank receives and keeps nothing.
        """
        if transfer_plan.kept is not None and source is not None and target is not None:
            target[transfer_plan.kept[1]].copy_(source[transfer_plan.kept[0]])
        for rank, run in transfer_plan.receives:
            assert target is not None
            if not _is_packed(target[run], (rank,), self._short_receives):
                if target.device.type == self._channel.device.type:
                    self._channel.receive(target[run], rank)
                else:
                    self._receive_packed([target[run]], rank)
        by_run: dict[tuple[int, int], list[int]] = {}
        for rank, run in transfer_plan.sends:
            by_run.setdefault((run.start, run.stop), []).append(rank)
        for (start, stop), ranks in by_run.items():
            assert source is not None
            if not _is_packed(source[start:stop], ranks, self._short_sends):
                self._channel.send(source[start:stop].contiguous().to(self._channel.device), ranks)

    def wait(self) -> None:
        """Block until all added tensors have been transferred, to this rank and from it."""
        for (rank, _), runs in self._short_receives.items():
            self._receive_packed(runs, rank)
        for (rank, _), runs in self._short_sends.items():
            self._channel.send(torch.cat(runs).to(self._channel.device), [rank])
        self._channel.wait()
        for received, targets in self._copies:
            for target, part in zip(targets, received.split([target.numel() for target in targets]), strict=True):
                target.copy_(part)
        self._copies = []
        self._short_sends, self._short_receives = {}, {}

    def _receive_packed(self, targets: list[torch.Tensor], source: int) -> None:
        """Begin to receive several targets as one run."""
        numel = sum(target.numel() for target in targets)
        run = torch.empty(numel, dtype=targets[0].dtype, device=self._channel.device)
        self._copies.append((run, targets))
        self._channel.receive(run, source)


def _channel_for(rank_group: RankGroup, device: torch.device, queue: TransportQueue) -> _GroupChannel | _HostChannel:
    group = rank_group.group
    if group is None or not moves_by_gloo(group, device):
        return _GroupChannel(group, device, at_once=False)
    transport = transport_of(rank_group) if rank_group.size > 1 else None
    # gloo sends CPU tensors only.
    return (
        _GroupChannel(group, torch.device("cpu"), at_once=True) if transport is None else _HostChannel(transport, queue)
    )


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


class _HostChannel:
    """Uses the shared-memory transport of a group, with a queue shared with the channels of other groups."""

    device = torch.device("cpu")

    def __init__(self, transport: SharedMemoryTransport, queue: TransportQueue) -> None:
        self._transport = transport
        self._queue = queue

    def send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        for part in _split_parts(run):
            self._queue.send(self._transport, part, to)

    def receive(self, run: torch.Tensor, source: int) -> None:
        for part in _split_parts(run):
            self._queue.expect(self._transport, part, source)

    def wait(self) -> None:
        self._queue.finish()


def _split_parts(run: torch.Tensor) -> Sequence[torch.Tensor]:
    # Sender and receiver have the same length and dtype, so they split alike.
    return run.split(_PART_NBYTES // run.itemsize) if run.nbytes > _PART_NBYTES else (run,)


class TransportQueue:
    """Queues the shared-memory messages in flight over all groups with transfers at the same time.

    Waiting for one group reads messages of all groups; otherwise ranks that wait for different groups could deadlock.
    """

    def __init__(self) -> None:
        # By transport and source rank, in the order in which they are sent.
        self._expected: dict[tuple[SharedMemoryTransport, int], deque[tuple[Message, torch.Tensor]]] = {}
        self._transports: set[SharedMemoryTransport] = set()

    def send(self, transport: SharedMemoryTransport, part: torch.Tensor, to: Sequence[int]) -> None:
        """Send ``part`` once enough of the earlier messages are read to bound the memory in use."""
        # Otherwise a rank that only sends would fill its memory with unread messages.
        self._transports.add(transport)
        most = max(0, _MOST_UNREAD_NBYTES - part.nbytes)
        if self._unread_nbytes() > most:
            self._read_until(lambda: self._unread_nbytes() <= most)
        transport.send("transfer", [(part, to)])

    def expect(self, transport: SharedMemoryTransport, part: torch.Tensor, source: int) -> None:
        """Expect a message from ``source``, for ``part``."""
        messages = self._expected.setdefault((transport, source), deque())
        messages.append((transport.expect("transfer", source, part.nbytes), part))

    def finish(self) -> None:
        """Block until all expected messages have arrived and all sent messages are read."""
        self._read_until(lambda: not self._expected and self._unread_nbytes() == 0)

    def _read_until(self, is_over: Callable[[], bool]) -> None:
        self._read()
        while not is_over():
            readers = {(transport, rank) for transport in self._transports for rank in transport.unread("transfer")}
            wait_for(readers.union(self._expected), "transfer")
            self._read()

    def _unread_nbytes(self) -> int:
        return sum(sum(transport.unread("transfer").values()) for transport in self._transports)

    def _read(self) -> None:
        """Read all messages that have arrived."""
        for place, messages in list(self._expected.items()):
            while messages and messages[0][0].is_completed():
                message, target = messages.popleft()
                target.copy_(message.content(target.dtype))
                message.close()
            if not messages:
                del self._expected[place]
