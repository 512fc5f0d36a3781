"""Transfers runs of elements between ranks, each directly from its source to its target tensor.

State dicts use these transfers: no tensor is all-gathered or sliced afterwards, so a save needs only the memory of its
result and moves each element once. Only short runs, for which a message costs more than a copy, are packed together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm.rank_groups import RankGroup, moves_by_gloo
from fsdp_flat.comm.shm import Message, SharedMemoryTransport, transport_of, wait_for
from fsdp_flat.layout import TransferPlan

_CPU = torch.device("cpu")
# Sender and receiver have to use the same threshold.
_SHORT_NBYTES = 1 << 16
# Packed runs take memory until they are unpacked, so the bytes in flight are limited.
_MAX_IN_FLIGHT_NBYTES = 1 << 26
# Long runs are sent through shared memory in parts, several of them unread, so that neither side waits for each part.
_PART_NBYTES = 1 << 22
_MOST_UNREAD_NBYTES = 1 << 24


class P2PChannels:
    """Executes transfer plans by p2p messages in several groups, within a memory limit for each group.

    Every rank of a group must add the same tensors of the group in the same order; ranks of several groups add those of
    all in one order. What a rank adds in a group that others are not in changes no message of the other groups.
    """

    def __init__(self) -> None:
        self._packing: dict[RankGroup, _PackingChannel] = {}
        self._shared: list[_SharedMemoryChannel] = []

    def add(
        self,
        transfer_plan: TransferPlan,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        rank_group: RankGroup,
        device: torch.device,
        nbytes: int = 0,
    ) -> None:
        """Begin to transfer one tensor; wait for earlier ones of the group if too many bytes are in flight.

        The group communicates on ``device``; other tensors are copied through it. ``source`` (1-D) has the elements
        that this rank holds; None if it sends and keeps nothing. ``target`` (1-D, of the sources' dtype) receives
        elements; None if this rank receives and keeps nothing. ``nbytes`` are those of the full tensor, equal on every
        rank of the group; 0 if the caller limits the bytes in flight.
        """
        if rank_group not in self._packing:
            channel = _channel_for(rank_group, device, self._shared)
            self._packing[rank_group] = _PackingChannel(channel, self._shared)
        self._packing[rank_group].add(transfer_plan, source, target, nbytes)

    def wait(self) -> None:
        """Block until all added tensors have been transferred, to this rank and from it."""
        for packing in self._packing.values():
            packing.wait()


class _PackingChannel:
    """Executes transfer plans in the channel of one group, and packs short runs until it waits.

    Ranks pack alike because they wait after the same tensors: when the bytes in flight would exceed the limit, and when
    all tensors have been added.
    """

    def __init__(self, channel: _Channel, shared: Sequence[_SharedMemoryChannel]) -> None:
        self._channel = channel
        self._shared = shared
        self._nbytes = 0
        self._short_receives: _Runs = {}
        self._short_sends: _Runs = {}
        # Targets of received runs that are packed together, or on another device than the channel.
        self._copies: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def add(
        self, transfer_plan: TransferPlan, source: torch.Tensor | None, target: torch.Tensor | None, nbytes: int
    ) -> None:
        if self._nbytes + nbytes > _MAX_IN_FLIGHT_NBYTES:
            self.wait()
        self._nbytes += nbytes
        if transfer_plan.kept is not None and source is not None and target is not None:
            target[transfer_plan.kept[1]].copy_(source[transfer_plan.kept[0]])
        for rank, run in transfer_plan.receives:
            assert target is not None
            if target[run].nbytes < _SHORT_NBYTES:
                self._short_receives.setdefault((rank, target.dtype), []).append(target[run])
            elif target.device.type == self._channel.device.type:
                self._channel.receive(target[run], rank)
            else:
                self._receive_packed([target[run]], rank)
        by_run: dict[tuple[int, int], list[int]] = {}
        for rank, run in transfer_plan.sends:
            by_run.setdefault((run.start, run.stop), []).append(rank)
        for (start, stop), ranks in by_run.items():
            assert source is not None
            part = source[start:stop]
            if part.nbytes < _SHORT_NBYTES:
                for rank in ranks:
                    self._short_sends.setdefault((rank, part.dtype), []).append(part)
            else:
                self._channel.send(part.contiguous().to(self._channel.device), ranks)

    def wait(self) -> None:
        for (rank, _), runs in self._short_receives.items():
            self._receive_packed(runs, rank)
        for (rank, _), runs in self._short_sends.items():
            self._channel.send(torch.cat(runs).to(self._channel.device), [rank])
        if not isinstance(self._channel, _SharedMemoryChannel):
            # Ranks that this one would wait for may wait until it has read what they sent through shared memory.
            for each in self._shared:
                each.wait()
        self._channel.wait()
        for received, targets in self._copies:
            for target, part in zip(targets, received.split([target.numel() for target in targets]), strict=True):
                target.copy_(part)
        self._short_receives, self._short_sends, self._copies, self._nbytes = {}, {}, [], 0

    def _receive_packed(self, targets: list[torch.Tensor], source: int) -> None:
        """Begin to receive several targets as one run."""
        numel = sum(target.numel() for target in targets)
        run = torch.empty(numel, dtype=targets[0].dtype, device=self._channel.device)
        self._copies.append((run, targets))
        self._channel.receive(run, source)


def _channel_for(rank_group: RankGroup, device: torch.device, shared: list[_SharedMemoryChannel]) -> _Channel:
    group = rank_group.group
    if group is None or not moves_by_gloo(group, device):
        return _GroupChannel(group, device, at_once=False)
    transport = transport_of(rank_group) if rank_group.size > 1 else None
    # gloo sends CPU tensors only.
    return _GroupChannel(group, _CPU, at_once=True) if transport is None else _SharedMemoryChannel(transport, shared)


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


class _SharedMemoryChannel:
    """Uses the shared-memory transport of a group; ``channels``, to which it adds itself, are those used together.

    Waiting for one reads messages of all of them; otherwise ranks that wait for different groups could deadlock.
    """

    device = _CPU

    def __init__(self, transport: SharedMemoryTransport, channels: list[_SharedMemoryChannel]) -> None:
        self._transport = transport
        self._channels = channels
        # By source rank, in the order in which they are sent.
        self._expected: dict[int, deque[tuple[Message, torch.Tensor]]] = {}
        channels.append(self)

    def send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        for part in _split_parts(run):
            # A rank that only sends would otherwise fill its memory with unread messages.
            has_too_much = partial(self._has_unread, _MOST_UNREAD_NBYTES - part.nbytes)
            if has_too_much():
                self._read_while(has_too_much)
            self._transport.send("transfer", [(part, to)])

    def receive(self, run: torch.Tensor, source: int) -> None:
        messages = self._expected.setdefault(source, deque())
        for part in _split_parts(run):
            messages.append((self._transport.expect("transfer", source, part.nbytes), part))

    def wait(self) -> None:
        self._read_while(lambda: bool(self._expected or self._transport.unread_transfers()))

    def _has_unread(self, most_nbytes: int) -> bool:
        """Return whether other ranks have not read more than ``most_nbytes`` of what this rank has sent."""
        nbytes = sum(sum(each._transport.unread_transfers().values()) for each in self._channels)
        return nbytes > max(0, most_nbytes)

    def _read_while(self, is_waiting: Callable[[], bool]) -> None:
        self._read()
        while is_waiting():
            ranks = {
                (each._transport, rank)
                for each in self._channels
                for rank in (*each._expected, *each._transport.unread_transfers())
            }
            wait_for(ranks, "transfer")
            self._read()

    def _read(self) -> None:
        """Read all messages that have arrived."""
        for each in self._channels:
            for source, messages in list(each._expected.items()):
                while messages and messages[0][0].is_completed():
                    message, target = messages.popleft()
                    target.copy_(message.content(target.dtype))
                    message.close()
                if not messages:
                    del each._expected[source]


_Channel = _GroupChannel | _SharedMemoryChannel
# By other rank and dtype.
_Runs = dict[tuple[int, torch.dtype], list[torch.Tensor]]


def _split_parts(run: torch.Tensor) -> Sequence[torch.Tensor]:
    # Sender and receiver have the same length and dtype, so they split alike.
    return run.split(_PART_NBYTES // run.itemsize) if run.nbytes > _PART_NBYTES else (run,)
