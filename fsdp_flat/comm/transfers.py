"""Runs of elements from rank to rank, each straight from where it lies to where it belongs.

State dicts are made of these: nothing is gathered or cut afterwards, so a save needs the memory of its result and
moves each element once. Only short runs, for which the message costs more than the copy, travel packed together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm.host_transports import transport_of
from fsdp_flat.comm.rank_groups import RankGroup, moves_by_gloo
from fsdp_flat.comm.shared_memory import Message, SharedMemoryTransport, wait_for
from fsdp_flat.layout import TransferPlan

__all__ = ["P2PChannels", "Transfers"]

# Where a message costs more than a copy depends on the network; both sides only have to draw the line alike.
_SHORT_NBYTES = 1 << 16
# Packed runs take memory until they are unpacked, so not everything is under way at once.
_MOST_UNDER_WAY_NBYTES = 1 << 26
# Of shared memory: long runs go in local shards, of which so many are unread that the sides need not keep step.
_PIECE_NBYTES = 1 << 22
_MOST_UNREAD_NBYTES = 1 << 24


class Transfers:
    """Point-to-point transfers along one group.

    Every rank of the group has to add the same tensors in the same order; between two ranks, runs arrive in the order
    in which they were added.

    Args:
        group: the ranks.
        device: the device of compute, over which the group communicates. Tensors elsewhere make a stop there.
        room: what is on its way along other groups at the same time; None if nothing is.
    """

    def __init__(self, rank_group: RankGroup, device: torch.device, room: TransportQueue | None = None) -> None:
        self._channel = _channel_for(rank_group, device, TransportQueue() if room is None else room)
        self._after: list[Callable[[], object]] = []
        self._short_sends: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._short_receives: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def add(self, moves: TransferPlan, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Begin to move one tensor.

        Args:
            moves: how this rank takes part.
            source: 1-D, what this rank holds; None if it sends nothing.
            target: 1-D, where what it wants is to go, of the dtype that the sources have; None if it wants nothing.
        """
        if moves.kept is not None and source is not None and target is not None:
            target[moves.kept[1]].copy_(source[moves.kept[0]])
        for rank, run in moves.receives:
            assert target is not None
            if not _is_packed(target[run], (rank,), self._short_receives):
                self._receive(target[run], rank)
        by_run: dict[tuple[int, int], list[int]] = {}
        for rank, run in moves.sends:
            by_run.setdefault((run.start, run.stop), []).append(rank)
        for (start, stop), ranks in by_run.items():
            assert source is not None
            if not _is_packed(source[start:stop], ranks, self._short_sends):
                self._send(source[start:stop].contiguous(), ranks)

    def wait(self) -> None:
        """Return when everything that was added has arrived, here and at the others."""
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
    """Whether a run is short, and then put with the others of its rank and dtype; both sides see that alike."""
    if run.nbytes >= _SHORT_NBYTES:
        return False
    for rank in ranks:
        short.setdefault((rank, run.dtype), []).append(run)
    return True


class _P2PChannel(Protocol):
    """What runs travel by, from rank to rank of a group.

    Attributes:
        device: where it takes and puts them.
    """

    device: torch.device

    def send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        """Begin to send to each of some ranks."""
        ...

    def receive(self, run: torch.Tensor, source: int) -> None:
        """Begin to receive into ``run``."""
        ...

    def wait(self) -> None:
        """Return when everything is there and nothing of what was sent is needed any more."""
        ...


class _GroupChannel:
    """By the group's messages, begun at once (gloo) or all together, as other backends want it.

    One rank alone has no group, and nothing to move.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, at_once: bool) -> None:
        self.device = device
        self._group = group
        self._at_once = at_once
        self._begun: list[Any] = []
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
            self._begun.append(operation(run, peer, group=self._group))
        else:
            self._batch.append(dist.P2POp(operation, run, peer, self._group))

    def wait(self) -> None:
        if self._batch:
            self._begun.extend(dist.batch_isend_irecv(self._batch))
        for work in self._begun:
            work.wait()
        self._begun, self._batch, self._alive = [], [], []


class TransportQueue:
    """What is on its way through shared memory, along all groups that transfers go along at once.

    Waiting for one group reads what has come along any, or ranks that wait for different groups would wait in a circle.
    """

    def __init__(self) -> None:
        # By where they come from, in the order in which they are sent.
        self._letters: dict[tuple[SharedMemoryTransport, int], deque[tuple[Message, torch.Tensor]]] = {}
        self._mailboxes: set[SharedMemoryTransport] = set()

    def send(self, transport: SharedMemoryTransport, piece: torch.Tensor, to: Sequence[int]) -> None:
        """Send a local shard, when so much of what was sent before is read that little memory is in use."""
        # A rank that only sends would else fill its memory with what nobody has had time to read.
        self._mailboxes.add(transport)
        most = max(0, _MOST_UNREAD_NBYTES - piece.nbytes)
        if self._unread_nbytes() > most:
            self._read_until(lambda: self._unread_nbytes() <= most)
        transport.send("transfer", [(piece, to)])

    def expect(self, transport: SharedMemoryTransport, piece: torch.Tensor, source: int) -> None:
        """Have a local shard received."""
        letters = self._letters.setdefault((transport, source), deque())
        letters.append((transport.expect("transfer", source, piece.nbytes), piece))

    def finish(self) -> None:
        """Return when everything has come, and everything that was sent is read."""
        self._read_until(lambda: not self._letters and self._unread_nbytes() == 0)

    def _read_until(self, is_over: Callable[[], bool]) -> None:
        self._read()
        while not is_over():
            readers = {(transport, rank) for transport in self._mailboxes for rank in transport.unread("transfer")}
            wait_for(readers.union(self._letters), "transfer")
            self._read()

    def _unread_nbytes(self) -> int:
        return sum(sum(transport.unread("transfer").values()) for transport in self._mailboxes)

    def _read(self) -> None:
        """Read what has come."""
        for place, letters in list(self._letters.items()):
            while letters and letters[0][0].is_completed():
                message, target = letters.popleft()
                target.copy_(message.content(target.dtype))
                message.close()
            if not letters:
                del self._letters[place]


class _SharedMemoryChannel:
    """By memory that the ranks share, of which a few local shards are in use at once."""

    device = torch.device("cpu")

    def __init__(self, transport: SharedMemoryTransport, room: TransportQueue) -> None:
        self._mailbox = transport
        self._room = room

    def send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        for piece in _pieces(run):
            self._room.send(self._mailbox, piece, to)

    def receive(self, run: torch.Tensor, source: int) -> None:
        for piece in _pieces(run):
            self._room.expect(self._mailbox, piece, source)

    def wait(self) -> None:
        self._room.finish()


def _pieces(run: torch.Tensor) -> Sequence[torch.Tensor]:
    # Both sides see the same length and dtype, so they cut alike.
    return run.split(_PIECE_NBYTES // run.itemsize) if run.nbytes > _PIECE_NBYTES else (run,)


def _channel_for(rank_group: RankGroup, device: torch.device, room: TransportQueue) -> _P2PChannel:
    group = rank_group.group
    if group is None or not moves_by_gloo(group, device):
        return _GroupChannel(group, device, at_once=False)
    # gloo sends CPU tensors only.
    transport = transport_of(rank_group) if rank_group.size > 1 else None
    return (
        _GroupChannel(group, torch.device("cpu"), at_once=True)
        if transport is None
        else _SharedMemoryChannel(transport, room)
    )


class P2PChannels:
    """Transfers along several groups, under way together as far as memory goes.

    Every rank of the groups has to add the same tensors in the same order.
    """

    def __init__(self) -> None:
        self._by_rank_group: dict[RankGroup, Transfers] = {}
        self._room = TransportQueue()
        self._nbytes_under_way = 0

    def add(
        self,
        rank_group: RankGroup,
        device: torch.device,
        moves: TransferPlan,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        nbytes: int,
    ) -> None:
        """Begin to move one tensor, or some before it first where many are on their way.

        Args:
            group: the ranks.
            device: the device of compute.
            moves, source, target: as :meth:`Transfers.add` takes them.
            nbytes: bytes of the whole tensor, the same on every rank.
        """
        if self._nbytes_under_way + nbytes > _MOST_UNDER_WAY_NBYTES:
            self.wait()
        self._nbytes_under_way += nbytes
        if rank_group not in self._by_rank_group:
            self._by_rank_group[rank_group] = Transfers(rank_group, device, self._room)
        self._by_rank_group[rank_group].add(moves, source, target)

    def wait(self) -> None:
        """Return when everything that was added has arrived."""
        for transfers in self._by_rank_group.values():
            transfers.wait()
        self._nbytes_under_way = 0


def _unpack(packed: torch.Tensor, runs: list[torch.Tensor]) -> None:
    for run, part in zip(runs, packed.split([run.numel() for run in runs]), strict=True):
        run.copy_(part)
