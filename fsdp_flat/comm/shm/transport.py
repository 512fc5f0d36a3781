"""Implements messages between the ranks of one host in memory that all of them have mapped.

Loopback sockets copy every byte twice inside the kernel and wake a thread for it on either side. Here a rank copies its
data into memory that its peers have mapped, and sends them a header with its location; they read it in place when they
need it. A header is one datagram over the socket between two ranks. The socket also orders the memory accesses of both
sides, reports at once that a rank has ended, and passes the file descriptors of new segments. No segment or socket has
a name in the file system, so no files remain however a rank ends. No thread is used: each call does its work at once.

A sender does not wait for readers: it reuses memory only after all readers have read it, and otherwise allocates more.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from fsdp_flat.comm import exchanges
from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.errors import PeerFailureError, RankMismatchError, UsageError

# Messages in a segment start at multiples of this, so that they are aligned for any dtype.
_ALIGN_NBYTES = 64
# A segment needs an open file on every rank, so short messages share one.
_SEGMENT_NBYTES = 1 << 22
# Sends after which an unused segment's memory is returned to the system: several steps of a large model.
_IDLE_SENDS = 1024

# Collectives in error texts, by purpose; headers have the position of the purpose.
_OPERATIONS = {"gather": "an all-gather", "reduction": "a reduce-scatter", "transfer": "a transfer"}
_PURPOSES = list(_OPERATIONS)
_POST, _READ = 0, 1
_HEADER = struct.Struct("<qqqqqq")


class _Header(NamedTuple):
    """Announces a message (``_POST``) or confirms that it was read (``_READ``)."""

    kind: int
    segment: int  # index of the sender's segment that holds the message
    start: int  # first byte in it
    nbytes: int
    purpose: int
    unit: int  # id of the unit, 0 for none


class Message:
    """Represents a message that a rank expects, as a ``Work`` that is complete when the message has arrived."""

    __slots__ = ("__weakref__", "_purpose", "_source", "_transport", "_unit", "header")

    def __init__(self, transport: SharedMemoryTransport, source: int, purpose: str, unit: int) -> None:
        self._transport = transport
        self._source = source
        self._purpose = purpose
        self._unit = unit
        self.header: _Header | None = None

    def is_completed(self) -> bool:
        if self.header is None:
            self._transport.receive_ready(self._source)
        return self.header is not None

    def wait(self) -> None:
        """Block until the message has arrived; errors are those of :func:`wait_for`."""
        while self.header is None:
            wait_for([(self._transport, self._source)], self._purpose, unit=self._unit)

    def content(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the message (1-D, of ``dtype``) in the sender's memory.

        Do not write to it, nor use it after :meth:`close`.
        """
        assert self.header is not None
        _, segment, start, nbytes, *_ = self.header
        return self._transport._theirs[self._source, segment][start : start + nbytes].view(dtype)

    def close(self) -> None:
        """Release the message, read or not, so that the sender may reuse its memory."""
        if self.header is not None:
            header, self.header = self.header, None
            self._transport.confirm(self._source, header)

    def __del__(self) -> None:
        # The garbage collector may run at any allocation, also while headers are read, so nothing is sent here.
        if self.header is not None:
            self._transport.deleted.append((self._source, self.header))


class _Expected(NamedTuple):
    """Describes an expected message, also after its :class:`Message` is deleted."""

    message: weakref.ref[Message]
    nbytes: int
    purpose: int
    unit: int


class _Segment:
    """Holds memory of this rank (1-D, uint8) that other ranks map by its file descriptor, and read."""

    __slots__ = ("_map", "_used", "fd", "index", "is_empty", "known_to", "last_send", "memory", "num_unread")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.fd = os.memfd_create("fsdp_flat")
        self.known_to: set[int] = set()  # ranks that have the file descriptor
        self.num_unread = 0  # counted once per reader
        self.last_send = 0  # count of the send that last used it
        self.is_empty = False  # its pages were released after long disuse
        self._used = 0
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Grow the memory; others must map it again when they next receive the file descriptor."""
        try:
            os.ftruncate(self.fd, nbytes)
            self._map, self.memory = _mapped(self.fd, nbytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"A rank can get no {nbytes} bytes of memory that it shares with other ranks ({error.strerror}). Raise "
                "the limit (ulimit -f or the memory of the container), or set FSDP_FLAT_SHARED_MEMORY=0 in the "
                "environment.",
            ) from error
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
    """Sends and receives the messages of this rank in one group, for one thread; created by ``transport_of``.

    Between two ranks, messages arrive in the order in which they were sent. ``peers`` are connected, non-blocking
    sockets; waiting for a rank that is silent for ``timeout_s`` fails. The purpose of a message is "gather",
    "reduction" or "transfer".
    """

    def __init__(self, rank_group: RankGroup, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        assert rank_group.group is not None
        # The group keeps its transport alive.
        self._group = weakref.ref(rank_group.group)
        self.rank = rank_group.rank
        self._peers = dict(peers)
        self.timeout_s = timeout_s
        self.names = exchanges.unit_names(rank_group.group)
        # Read by benchmarks and tests only, as nbytes is; counted once per destination rank.
        self.sent_nbytes = 0
        self._num_sends = 0
        self._segments: list[_Segment] = []
        self._theirs: dict[tuple[int, int], torch.Tensor] = {}
        # Expected messages that have not arrived, and headers of messages that arrived unexpected, in order.
        self._expected: dict[int, deque[_Expected]] = {rank: deque() for rank in peers}
        self._unexpected: dict[int, deque[_Header]] = {rank: deque() for rank in peers}
        self._unread_transfers = dict.fromkeys(peers, 0)
        # Source and header of messages that were deleted without being closed, to confirm at the next call.
        self.deleted: deque[tuple[int, _Header]] = deque()
        self._ended_ranks: set[int] = set()
        # The first mismatch between ranks; every later call raises it.
        self._mismatch: RankMismatchError | None = None
        self._files: list[int] = []
        self._close = weakref.finalize(self, close_all, list(peers.values()), self._files)

    def leave(self) -> None:
        """Close every connection; later headers of this process, such as for released messages, are not sent."""
        self._peers = {}
        self._close()

    @property
    def nbytes(self) -> int:
        """Number of bytes of this rank's shared memory that are in use or kept for later messages."""
        return sum(segment.memory.numel() for segment in self._segments if not segment.is_empty)

    def unread_transfers(self) -> dict[int, int]:
        """Return the bytes of transfers that are not confirmed as read, by rank, for ranks that have any."""
        return {rank: nbytes for rank, nbytes in self._unread_transfers.items() if nbytes}

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, purpose: str, messages: Sequence[tuple[torch.Tensor, Sequence[int]]], *, unit: int = 0) -> None:
        """Send tensors (1-D, contiguous, on the CPU) to their ranks; they are copied before this returns.

        ``unit`` is the id of the tensors' unit, 0 for none; a rank that expects another unit raises, as this does if
        one of the ranks has ended.
        """
        self._check()
        if exchanges.reported:
            exchanges.withdraw_report(self._group())
        for rank in self._peers:
            self.receive_ready(rank)
        self._num_sends += 1
        for tensor, ranks in messages:
            nbytes = tensor.nbytes
            segment, start = self._allocate(-(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES)
            segment.memory[start : start + nbytes].view(tensor.dtype).copy_(tensor)
            segment.last_send, segment.is_empty = self._num_sends, False
            header = _Header(_POST, segment.index, start, nbytes, _PURPOSES.index(purpose), unit)
            for rank in ranks:
                self.sent_nbytes += nbytes
                segment.num_unread += 1
                if purpose == "transfer":
                    self._unread_transfers[rank] += nbytes
                fds = [] if rank in segment.known_to else [segment.fd]
                segment.known_to.add(rank)
                self._send_header(rank, header, fds)
        for segment in self._segments:
            is_idle = segment.num_unread == 0 and segment.last_send < self._num_sends - _IDLE_SENDS
            if is_idle and not segment.is_empty:
                segment.release()

    def _allocate(self, nbytes: int) -> tuple[_Segment, int]:
        # Try small segments first, to keep large ones for messages that need them.
        by_size = sorted(self._segments, key=lambda segment: segment.memory.numel())
        for segment in by_size:
            start = segment.take(nbytes)
            if start is not None:
                return segment, start
        whole_pages = -(-max(_SEGMENT_NBYTES, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        free = [segment for segment in by_size if segment.num_unread == 0]
        if free:
            free[-1].grow(whole_pages)
        else:
            free = [_Segment(len(self._segments), whole_pages)]
            self._segments += free
            self._files.append(free[0].fd)
        free[-1].take(nbytes)
        return free[-1], 0

    def confirm(self, source: int, header: _Header) -> None:
        """Confirm to ``source`` that its message was read, or is not needed; do nothing if connections are closed."""
        if self._close.alive:  # not at the end of the process
            self._send_header(source, header._replace(kind=_READ, unit=0), [])

    def _send_header(self, rank: int, header: _Header, fds: list[int]) -> None:
        if rank not in self._peers:
            return
        while True:
            try:
                if fds:
                    socket.send_fds(self._peers[rank], [_HEADER.pack(*header)], fds)
                else:
                    self._peers[rank].send(_HEADER.pack(*header))
                return
            except BlockingIOError:
                # The peer has many headers to read, and may itself be waiting until it can send one.
                others = [(self, each) for each in self._peers if each == rank or each not in self._ended_ranks]
                wait_for(others, _PURPOSES[header.purpose], unit=header.unit, writable_rank=rank)
            except ConnectionError as error:
                # A rank that has ended needs no confirmation that its message was read.
                if header.kind == _POST:
                    raise self._ended_error(rank) from error
                return

    # -- receiving -----------------------------------------------------------------------------------------------

    def expect(self, purpose: str, source: int, nbytes: int, *, unit: int = 0) -> Message:
        """Expect a message from ``source``, the next after those expected before."""
        self._check()
        message = Message(self, source, purpose, unit)
        expected = _Expected(weakref.ref(message), nbytes, _PURPOSES.index(purpose), unit)
        early = self._unexpected[source]
        if early:
            self._deliver(expected, source, early.popleft())
        else:
            self._expected[source].append(expected)
        return message

    def _deliver(self, expected: _Expected, source: int, header: _Header) -> None:
        if (header.nbytes, header.purpose, header.unit) != (expected.nbytes, expected.purpose, expected.unit):
            self._mismatch = RankMismatchError(
                f"Rank {source} of the group came to {self.describe(header.purpose, header.unit)} ({header.nbytes} "
                f"bytes) where rank {self.rank} came to {self.describe(expected.purpose, expected.unit)} "
                f"({expected.nbytes} bytes): they do not run the same units in the same order. Check that every rank "
                "builds the same model and takes the same branches, and that an exception on one rank alone was not "
                "caught."
            )
            return
        message = expected.message()
        if message is None:
            self.confirm(source, header)  # the Message was deleted
        else:
            message.header = header

    def describe(self, purpose: int, unit: int) -> str:
        """Describe a collective for error texts."""
        operation = _OPERATIONS[_PURPOSES[purpose]]
        if not unit:
            return operation
        name = f"unit {self.names[unit]!r}" if unit in self.names else "another unit"
        return f"the {operation.partition(' ')[2]} of {name}"

    def _check(self, rank: int | None = None) -> None:
        """Raise if ranks have issued different collectives, if this is a forked child, or if ``rank`` has ended.

        Messages that were deleted are confirmed first.
        """
        while self.deleted:
            self.confirm(*self.deleted.popleft())
        if self._mismatch is not None:
            raise self._mismatch
        if not self._peers:
            raise UsageError(
                "A forked child of a rank used a process group of its parent. Start processes that communicate by "
                "spawn, and let each make its own groups."
            )
        if rank in self._ended_ranks:
            raise self._ended_error(rank)

    def receive_ready(self, source: int) -> None:
        """Process all headers that have arrived from ``source``, without waiting."""
        while True:
            try:
                content, fds, flags, _ = socket.recv_fds(self._peers[source], _HEADER.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it has ended with unread headers; the ones that it sent before follow now
            if not content:
                self._ended_ranks.add(source)
                return
            if flags & socket.MSG_CTRUNC:
                raise OSError(
                    errno.EMFILE,
                    f"Rank {self.rank} of the group has too many open files to map memory of rank {source}. Raise the "
                    "limit (ulimit -n), or set FSDP_FLAT_SHARED_MEMORY=0 in the environment.",
                )
            header = _Header._make(_HEADER.unpack(content))
            if header.kind == _READ:
                self._segments[header.segment].num_unread -= 1
                if _PURPOSES[header.purpose] == "transfer":
                    self._unread_transfers[source] -= header.nbytes
                continue
            if fds:
                _, self._theirs[source, header.segment] = _mapped(fds[0], os.fstat(fds[0]).st_size)
                os.close(fds[0])
            if self._expected[source]:
                self._deliver(self._expected[source].popleft(), source, header)
            else:
                self._unexpected[source].append(header)

    def unexpected(self) -> tuple[int, str] | None:
        """Return a rank that has sent an unexpected message, and its collective; None if there is none."""
        for rank in self._peers:
            self.receive_ready(rank)
        early = ((rank, headers[0]) for rank, headers in self._unexpected.items() if headers)
        return next(((rank, self.describe(header.purpose, header.unit)) for rank, header in early), None)

    @property
    def ended_ranks(self) -> frozenset[int]:
        """Return the ranks whose connections were closed, as far as :meth:`unexpected` has read them."""
        return frozenset(self._ended_ranks)

    def check_reports(self, rank: int, collective: str) -> None:
        """Raise a PeerFailureError if ``rank``, which this rank waits for, has reported that its step failed."""
        group = self._group()
        if group is None:
            return
        report = exchanges.reported_failure(RankGroup(group, self.rank, group.size()), [rank])
        if report is not None:
            raise PeerFailureError(
                f"Rank {self.rank} of the group waits in {collective} for a rank that has stopped: {report}. That "
                "error came first."
            )

    def _ended_error(self, rank: int | None) -> PeerFailureError:
        return PeerFailureError(
            f"Rank {rank} of the group has ended or closed its connections while rank {self.rank} exchanges tensors "
            f"with it. If the output of rank {rank} has an error, that came first and this one follows from it; if it "
            f"ended well, it made fewer steps than rank {self.rank}."
        )


def wait_for(
    sources: Collection[tuple[SharedMemoryTransport, int]],
    purpose: str,
    *,
    unit: int = 0,
    writable_rank: int | None = None,
) -> None:
    """Wait until a header arrives from one of several ranks, and process all that have arrived.

    With a ``writable_rank``, one of them, the wait also ends once a header can be sent to it. Raises a PeerFailureError
    if a rank has ended, or all are silent for the group's timeout, and a RankMismatchError if ranks have issued
    different collectives.
    """
    poll = select.poll()
    for transport, rank in sources:
        transport._check(rank)
        poll.register(transport._peers[rank], select.POLLIN | (select.POLLOUT if rank == writable_rank else 0))
    first, _ = next(iter(sources))
    ranks = sorted(rank for transport, rank in sources if transport is first)
    timeout_s = min(transport.timeout_s for transport, _ in sources)
    patience_s = min(exchanges.WARN_AFTER_S, timeout_s)
    if not poll.poll(patience_s * 1000):
        collective = first.describe(_PURPOSES.index(purpose), unit)
        if patience_s < timeout_s:
            exchanges.log_wait(first.rank, ranks, collective)
        until = time.monotonic() + timeout_s - patience_s
        while (left_s := until - time.monotonic()) > 0:
            for transport, rank in sources:
                transport.check_reports(rank, collective)
            if poll.poll(min(left_s, patience_s) * 1000):
                break
        else:
            raise PeerFailureError(
                f"Rank {first.rank} of the group has heard nothing from rank(s) {ranks}, which it waits for in "
                f"{collective}, for the {first.timeout_s:.0f} seconds of the group's timeout. They hang, or have not "
                "come to this collective: every rank must run the same units in the same order."
            )
    for transport, rank in sources:
        transport.receive_ready(rank)


def check_memory() -> None:
    """Raise an OSError if this process may not make memory that it can share."""
    fd = os.memfd_create("fsdp_flat")
    try:
        os.ftruncate(fd, _SEGMENT_NBYTES)
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    shared = mmap.mmap(fd, nbytes)
    return shared, torch.frombuffer(shared, dtype=torch.uint8)


def close_all(sockets: Iterable[socket.socket], files: Iterable[int] = ()) -> None:
    """Close sockets and file descriptors."""
    for peer in sockets:
        peer.close()
    for fd in files:
        os.close(fd)
