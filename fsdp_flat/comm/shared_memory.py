"""Messages between the ranks of one host, through memory that they share.

Loopback sockets copy every byte twice inside the kernel and wake a thread for it on either side. Here a rank copies
what it sends into memory that its peers have mapped too, and tells them where it lies; they read it in place when
they need it. A note is one datagram over a socket of the two ranks, which also orders the memory accesses of both
sides, says at once when a rank has ended, and carries the file descriptor of memory that the other does not know yet.
Nothing has a name in the file system, so nothing is left behind however a rank ends.

Between two ranks, messages arrive in the order in which they were sent. A sender does not wait for readers: memory that
a caller has not read yet is not used again, other memory is taken.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.errors import PeerFailureError, RankMismatchError, UsageError

__all__ = ["Message", "SharedMemoryTransport", "close_all", "wait_for"]

# Messages of one segment begin at multiples of this, so that any dtype may lie there.
_ALIGN_NBYTES = 64
# A segment takes files on every rank, so short messages share one.
_SEGMENT_NBYTES = 1 << 22
# Messages after which memory that none of them needed is given back to the system: several steps of a large model.
_IDLE_SENDS = 1024

# After so long a rank says which others it waits for.
PATIENCE_S = 10.0
_logger = logging.getLogger("fsdp_flat")

_POST, _READ = 0, 1
_HEADER = struct.Struct("<qqqqqq")  # kind, segment, start, nbytes, purpose, unit


class Message:
    """A message that a rank expects. It is a ``Work``, which is over when the message is there.

    Args:
        transport: where it arrives.
        source: rank of the group that sends it.
        nbytes: its length.
        purpose: what it is for, in a word.
        unit: number of the unit whose it is, 0 for none.
    """

    __slots__ = ("__weakref__", "_mailbox", "_place", "_unit", "nbytes", "purpose", "source")

    def __init__(self, transport: SharedMemoryTransport, source: int, nbytes: int, purpose: str, unit: int = 0) -> None:
        self._mailbox = transport
        self._unit = unit
        self._place: tuple[int, int] | None = None
        self.source = source
        self.nbytes = nbytes
        self.purpose = purpose

    def is_completed(self) -> bool:
        """Whether the message has come."""
        if self._place is None:
            self._mailbox.receive_ready(self.source)
        return self._place is not None

    def wait(self) -> None:
        """Block until the message is there.

        Raises:
            PeerFailureError: the sender has ended, or nothing came within the group's timeout.
            RankMismatchError: the sender sent something else.
        """
        while self._place is None:
            wait_for([(self._mailbox, self.source)], self.purpose, unit=self._unit)

    def arrive(self, segment: int, start: int) -> None:
        """The message lies at byte ``start`` of a segment of the sender's."""
        self._place = (segment, start)

    def content(self, dtype: torch.dtype) -> torch.Tensor:
        """The message (1-D, of ``dtype``), in the sender's memory: not to be written, nor kept after :meth:`close`."""
        assert self._place is not None
        return self._mailbox.view(self.source, *self._place, self.nbytes).view(dtype)

    def close(self) -> None:
        """The message was read, or nobody will; the sender may use the memory again."""
        if self._place is not None:
            segment, start = self._place
            self._place = None
            self._mailbox.send_header(self.source, _READ, segment, start, self.nbytes, _number(self.purpose))

    __del__ = close


class _Segment:
    """Memory of this rank that others may read.

    Attributes:
        fd: the file descriptor, by which others map it.
        memory: all of it (1-D, uint8).
        known_to: ranks that have mapped it.
        num_unread: messages in it that a caller has still to read, once for each reader.
        last_send: number of the send that used it last.
        is_empty: it has no pages, since it was idle for long.
    """

    __slots__ = ("_map", "_used", "fd", "index", "is_empty", "known_to", "last_send", "memory", "num_unread")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.fd = os.memfd_create("fsdp_flat")
        self.known_to: set[int] = set()
        self.num_unread = 0
        self.last_send = 0
        self._used = 0
        self.is_empty = False
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Have more bytes, which others map when they are sent the file descriptor again."""
        os.ftruncate(self.fd, nbytes)
        self._map, self.memory = _mapped(self.fd, nbytes)
        self.known_to.clear()

    def take(self, nbytes: int) -> int | None:
        """The start of ``nbytes`` that nobody reads; None if there are none."""
        if self.num_unread == 0:
            self._used = 0
        start = self._used
        if start + nbytes > self.memory.numel():
            return None
        self._used = start + nbytes
        return start

    def release(self) -> None:
        """Give the pages back to the system; they come back, as zeros, when a caller writes."""
        # A kernel that cannot do it has shared memory all the same.
        with suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE)
            self.is_empty = True


class SharedMemoryTransport:
    """This rank's end of the connections of one group, for one thread. Made by ``transport_of``.

    Args:
        group: the ranks.
        peers: a connected, non-blocking socket to every other rank.
        timeout_s: seconds after which a rank that sends nothing is given up.

    Attributes:
        sent_nbytes: bytes that were sent so far, once for each rank they went to.
        timeout_s: as given.
        names: what errors call units, by number.
    """

    def __init__(self, rank_group: RankGroup, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.sent_nbytes = 0
        self._rank = rank_group.rank
        self._peers = dict(peers)
        self.timeout_s = timeout_s
        self._num_sends = 0
        self._segments: list[_Segment] = []
        self._theirs: dict[tuple[int, int], torch.Tensor] = {}
        # Expected messages that have not come, and notes of those that came before they were expected, in order.
        self._expected: dict[int, deque[_Expected]] = {rank: deque() for rank in peers}
        self._early: dict[int, deque[tuple[int, int, int, int, int]]] = {rank: deque() for rank in peers}
        self._unread = [dict.fromkeys(peers, 0) for _ in _PURPOSES]
        # What errors call units, by what stands for them in notes.
        self.names: dict[int, str] = {}
        # Ranks that have ended, so that nothing more comes from them.
        self._gone: set[int] = set()
        # What showed that the ranks do not do the same; nothing can be trusted from then on.
        self._mismatch: RankMismatchError | None = None
        self._files: list[int] = []
        self._close = weakref.finalize(self, close_all, list(peers.values()), self._files)
        _open.add(self)

    def leave(self) -> None:
        """Close every connection, as if this process had nothing to do with it; its messages tell nobody any more."""
        self._peers = {}
        self._close()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shared memory that are in use or kept for the next messages."""
        return sum(segment.memory.numel() for segment in self._segments if not segment.is_empty)

    def unread(self, purpose: str) -> dict[int, int]:
        """By rank, bytes that were sent to it for ``purpose`` and that it is not known to have read, if any."""
        return {rank: nbytes for rank, nbytes in self._unread[_number(purpose)].items() if nbytes}

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, purpose: str, messages: Sequence[tuple[torch.Tensor, Sequence[int]]], *, unit: int = 0) -> None:
        """Send each tensor (1-D, contiguous, on the CPU) to the ranks beside it; it is copied before this returns.

        Args:
            purpose: what for, in a word.
            messages: tensors and ranks.
            unit: number of the unit whose they are, 0 for none; a rank that expects those of another one raises.

        Raises:
            PeerFailureError: one of them has ended.
        """
        self._check()
        for rank in self._peers:
            self.receive_ready(rank)
        self._num_sends += 1
        for tensor, ranks in messages:
            nbytes = tensor.nbytes
            segment, start = self._room_for(-(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES)
            segment.memory[start : start + nbytes].view(tensor.dtype).copy_(tensor)
            for rank in ranks:
                self._post(rank, segment, start, nbytes, purpose, unit)
        for segment in self._segments:
            idle = segment.num_unread == 0 and segment.last_send < self._num_sends - _IDLE_SENDS
            if idle and not segment.is_empty:
                segment.release()

    def _room_for(self, nbytes: int) -> tuple[_Segment, int]:
        # Short ones first, lest a message has a segment that a longer one needs.
        for segment in sorted(self._segments, key=lambda segment: segment.memory.numel()):
            start = segment.take(nbytes)
            if start is not None:
                break
        else:
            segment, start = self._new_room(max(_SEGMENT_NBYTES, nbytes)), 0
            segment.take(nbytes)
        segment.last_send = self._num_sends
        segment.is_empty = False
        return segment, start

    def _new_room(self, nbytes: int) -> _Segment:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = [segment for segment in self._segments if segment.num_unread == 0]
        if free:
            largest = max(free, key=lambda segment: segment.memory.numel())
            largest.grow(nbytes)
            return largest
        made = _Segment(len(self._segments), nbytes)
        self._segments.append(made)
        self._files.append(made.fd)
        return made

    def _post(self, rank: int, segment: _Segment, start: int, nbytes: int, purpose: str, unit: int) -> None:
        self.sent_nbytes += nbytes
        segment.num_unread += 1
        self._unread[_number(purpose)][rank] += nbytes
        fds = () if rank in segment.known_to else (segment.fd,)
        segment.known_to.add(rank)
        self.send_header(rank, _POST, segment.index, start, nbytes, _number(purpose), unit, fds)

    def send_header(
        self,
        rank: int,
        kind: int,
        segment: int,
        start: int,
        nbytes: int,
        purpose: int,
        unit: int = 0,
        fds: Sequence[int] = (),
    ) -> None:
        """Send a note."""
        if rank not in self._peers:
            return
        note = _HEADER.pack(kind, segment, start, nbytes, purpose, unit)
        while True:
            try:
                if fds:
                    socket.send_fds(self._peers[rank], [note], list(fds))
                else:
                    self._peers[rank].send(note)
                return
            except BlockingIOError:
                # The other side has many notes to read, and may be waiting for room for one of its own.
                others = [each for each in self._peers if each == rank or each not in self._gone]
                wait_for([(self, each) for each in others], _PURPOSES[purpose], unit=unit, room_at=rank)
            except ConnectionError as error:
                # Who has ended need not know what was read of theirs.
                if kind == _POST:
                    raise self.ended_error(rank) from error
                return

    # -- receiving -----------------------------------------------------------------------------------------------

    def expect(self, purpose: str, source: int, nbytes: int, *, unit: int = 0) -> Message:
        """The next message of ``source`` that nobody expects yet."""
        self._check()
        message = Message(self, source, nbytes, purpose, unit)
        expected = _Expected(weakref.ref(message), nbytes, _number(purpose), unit)
        early = self._early[source]
        if early:
            self._deliver(expected, source, *early.popleft())
        else:
            self._expected[source].append(expected)
        return message

    def _deliver(
        self, expected: _Expected, source: int, segment: int, start: int, nbytes: int, purpose: int, unit: int
    ) -> None:
        if (nbytes, purpose, unit) != (expected.nbytes, expected.purpose, expected.unit):
            self._mismatch = RankMismatchError(
                f"Rank {source} of the group came to {self.describe_collective(purpose, unit)} ({nbytes} bytes) where rank "
                f"{self._rank} came to {self.describe_collective(expected.purpose, expected.unit)} ({expected.nbytes} bytes): they "
                "do not run the same units in the same order. Check that every rank builds the same model and takes "
                "the same branches, and that an exception on one rank alone was not caught."
            )
            return
        message = expected.message()
        if message is None:
            self.send_header(source, _READ, segment, start, nbytes, purpose)  # nobody waits for it any more
        else:
            message.arrive(segment, start)

    def describe_collective(self, purpose: int, unit: int) -> str:
        """What errors call a collective, by the numbers of its purpose and of its unit, 0 for none."""
        operation = _OPERATIONS[purpose]
        if not unit:
            return f"{'an' if operation[0] == 'a' else 'a'} {operation}"
        return f"the {operation} of {f'unit {self.names[unit]!r}' if unit in self.names else 'another unit'}"

    def _check(self) -> None:
        if self._mismatch is not None:
            raise self._mismatch
        if not self._peers:
            raise UsageError(
                "A forked child of a rank used a process group of its parent. Start processes that communicate by "
                "spawn, and let each make its own groups."
            )

    def receive_ready(self, source: int) -> None:
        """Take in what has come from ``source``, without waiting."""
        while True:
            try:
                note, fds, flags, _ = socket.recv_fds(self._peers[source], _HEADER.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it has ended with notes unread; what it had sent before comes now
            if not note:
                self._gone.add(source)
                return
            if flags & socket.MSG_CTRUNC:
                raise OSError(
                    errno.EMFILE,
                    f"Rank {self._rank} of the group has too many open files to map memory of rank {source}. Raise the "
                    "limit (ulimit -n), or set FSDP_FLAT_SHARED_MEMORY=0 in the environment.",
                )
            kind, segment, start, nbytes, purpose, unit = _HEADER.unpack(note)
            if kind == _READ:
                self._segments[segment].num_unread -= 1
                self._unread[purpose][source] -= nbytes
                continue
            if fds:
                _, self._theirs[source, segment] = _mapped(fds[0], os.fstat(fds[0]).st_size)
                os.close(fds[0])
            if self._expected[source]:
                self._deliver(self._expected[source].popleft(), source, segment, start, nbytes, purpose, unit)
            else:
                self._early[source].append((segment, start, nbytes, purpose, unit))

    def unexpected(self) -> tuple[int, str] | None:
        """A rank that has sent what nobody here expects yet, and in which collective; None if there is none."""
        for rank in self._peers:
            self.receive_ready(rank)
        return next(
            (
                (rank, self.describe_collective(early[0][3], early[0][4]))
                for rank, early in self._early.items()
                if early
            ),
            None,
        )

    def view(self, source: int, segment: int, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of a segment of another rank's."""
        return self._theirs[source, segment][start : start + nbytes]

    def socket_to(self, rank: int) -> socket.socket:
        """The connection to a rank.

        Raises:
            PeerFailureError: the rank has ended.
            RankMismatchError: the ranks do not do the same.
        """
        self._check()
        if rank in self._gone:
            raise self.ended_error(rank)
        return self._peers[rank]

    def ended_error(self, rank: int) -> PeerFailureError:
        """What to raise where a rank has ended."""
        return PeerFailureError(
            f"Rank {rank} of the group has ended or closed its connections while rank {self._rank} exchanges tensors "
            f"with it. If the output of rank {rank} has an error, that came first and this one follows from it; if it "
            f"ended well, it made fewer steps than rank {self._rank}."
        )

    def log_wait(self, ranks: Sequence[int], doing: str) -> None:
        """Logs which ranks it has waited for, and in which collective."""
        text = "rank %d of the group has waited %.0f s for rank(s) %s in %s"
        _logger.warning(text, self._rank, PATIENCE_S, sorted(ranks), doing)

    def timeout_error(self, ranks: Sequence[int], doing: str) -> PeerFailureError:
        """What to raise where ranks send nothing for the group's timeout."""
        return PeerFailureError(
            f"Rank {self._rank} of the group has heard nothing from rank(s) {sorted(ranks)}, which it waits for in "
            f"{doing}, for the {self.timeout_s:.0f} seconds of the group's timeout. They hang, or have not come to "
            "this collective: every rank must run the same units in the same order."
        )


def wait_for(
    sources: Collection[tuple[SharedMemoryTransport, int]], purpose: str, *, unit: int = 0, room_at: int | None = None
) -> None:
    """Wait until something comes from one of several ranks, and take it in.

    Args:
        sources: ranks, and the transports that they send to.
        purpose: what is waited for, in a word.
        unit: number of the unit whose it is, 0 for none.
        room_at: room for a note to this one of the ranks ends the waiting too.

    Raises:
        PeerFailureError: one of them has ended, or nothing came within the group's timeout.
        RankMismatchError: one of them sent something else than was expected.
    """
    poll = select.poll()
    for transport, rank in sources:
        poll.register(transport.socket_to(rank), select.POLLIN | (select.POLLOUT if rank == room_at else 0))
    timeout_s = min(transport.timeout_s for transport, _ in sources)
    patience_s = min(PATIENCE_S, timeout_s)
    if not poll.poll(patience_s * 1000):
        first, _ = next(iter(sources))
        ranks = [rank for transport, rank in sources if transport is first]
        doing = first.describe_collective(_number(purpose), unit)
        if patience_s < timeout_s:
            first.log_wait(ranks, doing)
        if patience_s == timeout_s or not poll.poll((timeout_s - patience_s) * 1000):
            raise first.timeout_error(ranks, doing)
    for transport, rank in sources:
        transport.receive_ready(rank)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A message that was expected, also where nobody waits for it any more."""

    message: weakref.ref[Message]
    nbytes: int
    purpose: int
    unit: int


_PURPOSES = ("gather", "reduction", "transfer")
_OPERATIONS = ("all-gather", "reduce-scatter", "transfer")


def _number(purpose: str) -> int:
    return _PURPOSES.index(purpose)


def _mapped(fd: int, nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    shared = mmap.mmap(fd, nbytes)
    return shared, torch.frombuffer(shared, dtype=torch.uint8)


def close_all(sockets: Iterable[socket.socket], files: Iterable[int] = ()) -> None:
    """Close connections and files."""
    for peer in sockets:
        peer.close()
    for fd in files:
        os.close(fd)


_open: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _forked() -> None:
    """In a child: let go of the parent's connections, by which its peers see that it has ended."""
    for transport in list(_open):
        transport.leave()


os.register_at_fork(after_in_child=_forked)
