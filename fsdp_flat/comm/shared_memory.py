"""Sends messages between the ranks of one host through shared memory.

Loopback sockets copy every byte twice inside the kernel and wake a thread for it on either side. Here a rank copies its
data into memory that its peers have mapped, and sends them a header with its location; they read it in place when they
need it. A header is one datagram over the socket between two ranks. The socket also orders the memory accesses of both
sides, reports at once that a rank has ended, and passes the file descriptors of new segments. No segment or socket has
a name in the file system, so no files remain however a rank ends.

Between two ranks, messages arrive in the order in which they were sent. A sender does not wait for readers: it reuses
memory only after all readers have read it, and otherwise allocates more.
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

# Messages in a segment start at multiples of this, so that they are aligned for any dtype.
_ALIGN_NBYTES = 64
# A segment needs an open file on every rank, so short messages share one.
_SEGMENT_NBYTES = 1 << 22
# Sends after which an unused segment's memory is returned to the system: several steps of a large model.
_IDLE_SENDS = 1024

# Time after which a rank logs which other ranks it waits for.
WARN_AFTER_S = 10.0
_logger = logging.getLogger("fsdp_flat")

_POST, _READ = 0, 1
_HEADER = struct.Struct("<qqqqqq")  # kind, segment, start, nbytes, purpose, unit


class Message:
    """Represents a message that a rank expects, as a ``Work`` that is complete when the message has arrived.

    Args:
        transport: the transport that receives it.
        source: rank of the group that sends it.
        nbytes: its length.
        purpose: its purpose, one of ``_PURPOSES``.
        unit: id of its unit, 0 for none.
    """

    __slots__ = ("__weakref__", "_place", "_transport", "_unit", "nbytes", "purpose", "source")

    def __init__(self, transport: SharedMemoryTransport, source: int, nbytes: int, purpose: str, unit: int = 0) -> None:
        self._transport = transport
        self._unit = unit
        self._place: tuple[int, int] | None = None
        self.source = source
        self.nbytes = nbytes
        self.purpose = purpose

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        if self._place is None:
            self._transport.receive_ready(self.source)
        return self._place is not None

    def wait(self) -> None:
        """Block until the message has arrived.

        Raises:
            PeerFailureError: if the sender has ended, or sent nothing within the group's timeout.
            RankMismatchError: if the sender sent a different message.
        """
        while self._place is None:
            wait_for([(self._transport, self.source)], self.purpose, unit=self._unit)

    def arrive(self, segment: int, start: int) -> None:
        """Set the location of the message: byte ``start`` of one of the sender's segments."""
        self._place = (segment, start)

    def content(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the message (1-D, of ``dtype``) in the sender's memory.

        Do not write to it, nor use it after :meth:`close`.
        """
        assert self._place is not None
        return self._transport.view(self.source, *self._place, self.nbytes).view(dtype)

    def close(self) -> None:
        """Release the message, read or not, so that the sender may reuse its memory."""
        if self._place is not None:
            segment, start = self._place
            self._place = None
            self._transport.send_header(self.source, _READ, segment, start, self.nbytes, _purpose_id(self.purpose))

    __del__ = close


class _Segment:
    """Holds memory of this rank that other ranks map and read.

    Attributes:
        fd: file descriptor, by which others map it.
        memory: the memory (1-D, uint8).
        known_to: ranks that have its file descriptor.
        num_unread: unread messages in it, counted once per reader.
        last_send: count of the send that last used it.
        is_empty: its pages were released after long disuse.
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
        """Grow the memory to ``nbytes``; others must map it again when they next receive the file descriptor."""
        os.ftruncate(self.fd, nbytes)
        self._map, self.memory = _mapped(self.fd, nbytes)
        self.known_to.clear()

    def take(self, nbytes: int) -> int | None:
        """Reserve ``nbytes`` that no reader uses and return their start; None if there is no space."""
        if self.num_unread == 0:
            self._used = 0
        start = self._used
        if start + nbytes > self.memory.numel():
            return None
        self._used = start + nbytes
        return start

    def release(self) -> None:
        """Return the pages to the system, which allocates them again, as zeros, on the next write."""
        # Shared memory works also on kernels that do not support this.
        with suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE)
            self.is_empty = True


class SharedMemoryTransport:
    """Sends and receives this rank's messages in one group, for one thread; created by ``transport_of``.

    Args:
        rank_group: the ranks.
        peers: a connected, non-blocking socket to every other rank.
        timeout_s: seconds after which waiting for a silent rank fails.

    Attributes:
        sent_nbytes: bytes sent so far, counted once per destination rank.
        timeout_s: the argument.
        names: unit names for error texts, by unit id.
    """

    def __init__(self, rank_group: RankGroup, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.sent_nbytes = 0
        self._rank = rank_group.rank
        self._peers = dict(peers)
        self.timeout_s = timeout_s
        self._num_sends = 0
        self._segments: list[_Segment] = []
        self._theirs: dict[tuple[int, int], torch.Tensor] = {}
        # Expected messages that have not arrived, and headers of messages that arrived unexpected, in order.
        self._expected: dict[int, deque[_Expected]] = {rank: deque() for rank in peers}
        self._unexpected: dict[int, deque[tuple[int, int, int, int, int]]] = {rank: deque() for rank in peers}
        self._unread = [dict.fromkeys(peers, 0) for _ in _PURPOSES]
        # Unit names for error texts, by the unit id in headers.
        self.names: dict[int, str] = {}
        # Ranks that have ended and will send nothing more.
        self._ended_ranks: set[int] = set()
        # The first mismatch between ranks; every later call raises it.
        self._mismatch: RankMismatchError | None = None
        self._files: list[int] = []
        self._close = weakref.finalize(self, close_all, list(peers.values()), self._files)
        _open.add(self)

    def leave(self) -> None:
        """Close every connection; later headers of this process, such as for released messages, are not sent."""
        self._peers = {}
        self._close()

    @property
    def nbytes(self) -> int:
        """Number of bytes of this rank's shared memory that are in use or kept for later messages."""
        return sum(segment.memory.numel() for segment in self._segments if not segment.is_empty)

    def unread(self, purpose: str) -> dict[int, int]:
        """Return the bytes sent for ``purpose`` that are not confirmed as read, by rank, for ranks that have any."""
        return {rank: nbytes for rank, nbytes in self._unread[_purpose_id(purpose)].items() if nbytes}

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, purpose: str, messages: Sequence[tuple[torch.Tensor, Sequence[int]]], *, unit: int = 0) -> None:
        """Send tensors to ranks; they are copied before this returns.

        Args:
            purpose: purpose of the messages, one of ``_PURPOSES``.
            messages: pairs of a tensor (1-D, contiguous, on the CPU) and its destination ranks.
            unit: id of the tensors' unit, 0 for none; a rank that expects another unit raises.

        Raises:
            PeerFailureError: if one of the ranks has ended.
        """
        self._check()
        for rank in self._peers:
            self.receive_ready(rank)
        self._num_sends += 1
        for tensor, ranks in messages:
            nbytes = tensor.nbytes
            segment, start = self._allocate(-(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES)
            segment.memory[start : start + nbytes].view(tensor.dtype).copy_(tensor)
            for rank in ranks:
                self._post(rank, segment, start, nbytes, purpose, unit)
        for segment in self._segments:
            idle = segment.num_unread == 0 and segment.last_send < self._num_sends - _IDLE_SENDS
            if idle and not segment.is_empty:
                segment.release()

    def _allocate(self, nbytes: int) -> tuple[_Segment, int]:
        # Try small segments first, to keep large ones for messages that need them.
        for segment in sorted(self._segments, key=lambda segment: segment.memory.numel()):
            start = segment.take(nbytes)
            if start is not None:
                break
        else:
            segment, start = self._new_segment(max(_SEGMENT_NBYTES, nbytes)), 0
            segment.take(nbytes)
        segment.last_send = self._num_sends
        segment.is_empty = False
        return segment, start

    def _new_segment(self, nbytes: int) -> _Segment:
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
        self._unread[_purpose_id(purpose)][rank] += nbytes
        fds = () if rank in segment.known_to else (segment.fd,)
        segment.known_to.add(rank)
        self.send_header(rank, _POST, segment.index, start, nbytes, _purpose_id(purpose), unit, fds)

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
        """Send a header to ``rank``."""
        if rank not in self._peers:
            return
        header = _HEADER.pack(kind, segment, start, nbytes, purpose, unit)
        while True:
            try:
                if fds:
                    socket.send_fds(self._peers[rank], [header], list(fds))
                else:
                    self._peers[rank].send(header)
                return
            except BlockingIOError:
                # The peer has many headers to read, and may itself be waiting until it can send one.
                others = [each for each in self._peers if each == rank or each not in self._ended_ranks]
                wait_for([(self, each) for each in others], _PURPOSES[purpose], unit=unit, writable_rank=rank)
            except ConnectionError as error:
                # A rank that has ended needs no confirmation that its message was read.
                if kind == _POST:
                    raise self.ended_error(rank) from error
                return

    # -- receiving -----------------------------------------------------------------------------------------------

    def expect(self, purpose: str, source: int, nbytes: int, *, unit: int = 0) -> Message:
        """Expect a message from ``source``, the next after those expected before."""
        self._check()
        message = Message(self, source, nbytes, purpose, unit)
        expected = _Expected(weakref.ref(message), nbytes, _purpose_id(purpose), unit)
        early = self._unexpected[source]
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
                f"Rank {source} of the group came to {self.describe_collective(purpose, unit)} ({nbytes} bytes) where "
                f"rank {self._rank} came to {self.describe_collective(expected.purpose, expected.unit)} "
                f"({expected.nbytes} bytes): they do not run the same units in the same order. Check that every rank "
                "builds the same model and takes the same branches, and that an exception on one rank alone was not "
                "caught."
            )
            return
        message = expected.message()
        if message is None:
            self.send_header(source, _READ, segment, start, nbytes, purpose)  # the Message was deleted
        else:
            message.arrive(segment, start)

    def describe_collective(self, purpose: int, unit: int) -> str:
        """Describe a collective for error texts, given the index of its purpose and its unit id, 0 for none."""
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
        """Process all headers that have arrived from ``source``, without waiting."""
        while True:
            try:
                header, fds, flags, _ = socket.recv_fds(self._peers[source], _HEADER.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it has ended with unread headers; the ones that it sent before follow now
            if not header:
                self._ended_ranks.add(source)
                return
            if flags & socket.MSG_CTRUNC:
                raise OSError(
                    errno.EMFILE,
                    f"Rank {self._rank} of the group has too many open files to map memory of rank {source}. Raise the "
                    "limit (ulimit -n), or set FSDP_FLAT_SHARED_MEMORY=0 in the environment.",
                )
            kind, segment, start, nbytes, purpose, unit = _HEADER.unpack(header)
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
                self._unexpected[source].append((segment, start, nbytes, purpose, unit))

    def unexpected(self) -> tuple[int, str] | None:
        """Return a rank that has sent an unexpected message, and its collective; None if there is none."""
        for rank in self._peers:
            self.receive_ready(rank)
        return next(
            (
                (rank, self.describe_collective(early[0][3], early[0][4]))
                for rank, early in self._unexpected.items()
                if early
            ),
            None,
        )

    def view(self, source: int, segment: int, start: int, nbytes: int) -> torch.Tensor:
        """Return a view of ``nbytes`` bytes of another rank's segment."""
        return self._theirs[source, segment][start : start + nbytes]

    def socket_to(self, rank: int) -> socket.socket:
        """Return the socket to a rank.

        Raises:
            PeerFailureError: if the rank has ended.
            RankMismatchError: if ranks have issued different collectives.
        """
        self._check()
        if rank in self._ended_ranks:
            raise self.ended_error(rank)
        return self._peers[rank]

    def ended_error(self, rank: int) -> PeerFailureError:
        """Create the error for a rank that has ended."""
        return PeerFailureError(
            f"Rank {rank} of the group has ended or closed its connections while rank {self._rank} exchanges tensors "
            f"with it. If the output of rank {rank} has an error, that came first and this one follows from it; if it "
            f"ended well, it made fewer steps than rank {self._rank}."
        )

    def log_wait(self, ranks: Sequence[int], collective: str) -> None:
        """Log the ranks that this rank waits for, and the collective."""
        text = "rank %d of the group has waited %.0f s for rank(s) %s in %s"
        _logger.warning(text, self._rank, WARN_AFTER_S, sorted(ranks), collective)

    def timeout_error(self, ranks: Sequence[int], collective: str) -> PeerFailureError:
        """Create the error for ranks that send nothing within the group's timeout."""
        return PeerFailureError(
            f"Rank {self._rank} of the group has heard nothing from rank(s) {sorted(ranks)}, which it waits for in "
            f"{collective}, for the {self.timeout_s:.0f} seconds of the group's timeout. They hang, or have not come "
            "to this collective: every rank must run the same units in the same order."
        )


def wait_for(
    sources: Collection[tuple[SharedMemoryTransport, int]],
    purpose: str,
    *,
    unit: int = 0,
    writable_rank: int | None = None,
) -> None:
    """Wait until a header arrives from one of several ranks, and process all that have arrived.

    Args:
        sources: pairs of a transport and a rank that sends to it.
        purpose: purpose of the message, one of ``_PURPOSES``.
        unit: id of its unit, 0 for none.
        writable_rank: one of the ranks; the wait also ends once a header can be sent to it.

    Raises:
        PeerFailureError: if a rank has ended, or all are silent for the group's timeout.
        RankMismatchError: if ranks have issued different collectives.
    """
    poll = select.poll()
    for transport, rank in sources:
        poll.register(transport.socket_to(rank), select.POLLIN | (select.POLLOUT if rank == writable_rank else 0))
    timeout_s = min(transport.timeout_s for transport, _ in sources)
    patience_s = min(WARN_AFTER_S, timeout_s)
    if not poll.poll(patience_s * 1000):
        first, _ = next(iter(sources))
        ranks = [rank for transport, rank in sources if transport is first]
        collective = first.describe_collective(_purpose_id(purpose), unit)
        if patience_s < timeout_s:
            first.log_wait(ranks, collective)
        if patience_s == timeout_s or not poll.poll((timeout_s - patience_s) * 1000):
            raise first.timeout_error(ranks, collective)
    for transport, rank in sources:
        transport.receive_ready(rank)


@dataclass(frozen=True, slots=True)
class _Expected:
    """Records an expected message, also after its :class:`Message` is deleted."""

    message: weakref.ref[Message]
    nbytes: int
    purpose: int
    unit: int


_PURPOSES = ("gather", "reduction", "transfer")
_OPERATIONS = ("all-gather", "reduce-scatter", "transfer")


def _purpose_id(purpose: str) -> int:
    return _PURPOSES.index(purpose)


def _mapped(fd: int, nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    shared = mmap.mmap(fd, nbytes)
    return shared, torch.frombuffer(shared, dtype=torch.uint8)


def close_all(sockets: Iterable[socket.socket], files: Iterable[int] = ()) -> None:
    """Close sockets and file descriptors."""
    for peer in sockets:
        peer.close()
    for fd in files:
        os.close(fd)


_open: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _forked() -> None:
    """Close the parent's connections in a forked child, so that peers can detect that the parent has ended."""
    for transport in list(_open):
        transport.leave()


os.register_at_fork(after_in_child=_forked)
