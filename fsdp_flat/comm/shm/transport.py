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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fsdp_flat.comm import failures
from fsdp_flat.comm.calls import Place, Progress, mismatch, unit_names
from fsdp_flat.comm.given_up import Pending, give_up
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
_HEADER = struct.Struct("<10q")

# Reads messages (1-D), by the rank that sent them, and returns the result. They are gone afterwards.
Read = Callable[[dict[int, torch.Tensor]], torch.Tensor]


class _Header(NamedTuple):
    """Announces a message (``_POST``) or confirms that it was read (``_READ``)."""

    kind: int
    segment: int  # the sender's file descriptor of the segment that holds the message
    start: int  # first byte in it
    nbytes: int
    purpose: int
    unit: int  # id of the unit, 0 for none
    # Where the sender is in training, as in ``Place``.
    phase: int
    num_steps: int
    num_forwards: int
    in_no_sync: int


@dataclass(slots=True, eq=False)
class Messages(Pending):
    """Waits for one message from each of several ranks; :meth:`wait` reads them in the memory of their senders.

    Attributes:
        missing: the ranks whose messages have not arrived.
        arrived: for messages that are not read yet, by rank, the headers that will confirm that they were.
    """

    transport: SharedMemoryTransport
    missing: list[int]
    dtype: torch.dtype
    nbytes: int
    purpose: str
    unit: int
    read: Read | None
    place: Place
    arrived: dict[int, _Header] = field(default_factory=dict)
    result: Any = None

    def is_completed(self) -> bool:
        for source in tuple(self.missing):
            self.transport.receive(source)
        return not self.missing

    @property
    def rank_group(self) -> RankGroup:
        return self.transport.rank_group

    def rank_groups(self) -> list[RankGroup]:
        return [self.rank_group]

    def blocks_host(self) -> bool:
        return True

    def is_lost(self) -> bool:
        return self.transport.is_lost(self.missing)

    def wait(self) -> torch.Tensor:
        """Block until all messages have arrived, and return what is read; errors are those of :func:`wait_for`."""
        try:
            while self.missing:
                wait_for({self.transport: self.missing}, self.purpose, self.unit)
        except BaseException:
            give_up(self)
            raise
        if self.read is not None:
            read, self.read = self.read, None
            messages = {}
            for source, (_, segment, start, nbytes, *_) in self.arrived.items():
                messages[source] = self.transport.theirs[source, segment][start : start + nbytes].view(self.dtype)
            self.result = read(messages)
            for source, header in self.arrived.items():
                self.transport.send_header(source, header)
            self.arrived = {}
        return self.result

    def __del__(self) -> None:
        # The garbage collector may run at any allocation, also while headers are read, so nothing is sent here.
        self.transport.dropped.extend(self.arrived.items())


class _Segment:
    """Holds memory of this rank (1-D, uint8) that other ranks map by its file descriptor, and read."""

    __slots__ = ("_map", "fd", "is_empty", "known_to", "last_send", "memory", "nbytes", "num_unread", "used")

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("fsdp_flat")
        self.known_to: set[int] = set()  # ranks that have the file descriptor
        self.num_unread = 0  # messages, counted once per reader
        self.used = 0  # bytes from the start that have messages, read or not
        self.last_send = 0  # count of the send that last used it
        self.is_empty = False  # its pages were released after long disuse
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
        self.nbytes = nbytes
        self.known_to.clear()

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

    def __init__(self, rank_group: RankGroup, peers: dict[int, socket.socket], timeout_s: float) -> None:
        # The group keeps its transport alive.
        self._group = weakref.ref(rank_group.process_group)
        self.rank, self._size = rank_group.rank, rank_group.size
        self._peers = peers
        self.timeout_s = timeout_s
        self.names = unit_names(rank_group.process_group)
        # Read by benchmarks and tests only, as nbytes is; counted once per destination rank.
        self.sent_nbytes = 0
        self._num_sends = 0
        self._segments: dict[int, _Segment] = {}  # by file descriptor
        self.theirs: dict[tuple[int, int], torch.Tensor] = {}
        # Messages that have not arrived, and headers of messages that nobody expects yet, in order.
        self._expected: dict[int, deque[Messages]] = {rank: deque() for rank in peers}
        self._early: dict[int, deque[_Header]] = {rank: deque() for rank in peers}
        self._unread_transfers = dict.fromkeys(peers, 0)
        # Sources and headers that confirm messages which were deleted without being read, to be sent at the next call.
        self.dropped: deque[tuple[int, _Header]] = deque()
        self._ended_ranks: set[int] = set()
        # The first mismatch between ranks; every later call raises it.
        self._mismatch: RankMismatchError | None = None
        # Closes every connection; headers of this process, such as for messages that were read, are not sent any more.
        self.leave = weakref.finalize(self, close_all, peers, self._segments)

    @property
    def rank_group(self) -> RankGroup:
        """The group, and this rank in it."""
        return RankGroup(self._group(), self.rank, self._size)

    @property
    def nbytes(self) -> int:
        """Number of bytes of this rank's shared memory that are in use or kept for later messages."""
        return sum(segment.nbytes for segment in self._segments.values() if not segment.is_empty)

    def unread_transfers(self) -> dict[int, int]:
        """Return the bytes of transfers that are not confirmed as read, by rank, for ranks that have any."""
        return {rank: nbytes for rank, nbytes in self._unread_transfers.items() if nbytes}

    def is_lost(self, ranks: Collection[int]) -> bool:
        """Return whether messages of ``ranks`` will never come: one has ended, or calls of ranks differ."""
        return self._mismatch is not None or not self._ended_ranks.isdisjoint(ranks)

    def _check(self, ranks: Collection[int] = (), purpose: str = "transfer", unit: int = 0) -> None:
        """Raise if collectives of ranks differ, if this is a forked child, or if one of ``ranks`` has ended.

        Messages that were dropped are confirmed first.
        """
        while self.dropped:
            self.send_header(*self.dropped.popleft())
        if self._mismatch is not None:
            raise self._mismatch
        if not self._peers:
            raise UsageError(
                "A forked child of a rank used a process group of its parent. Start processes that communicate by "
                "spawn, and let each make its own groups."
            )
        for rank in self._ended_ranks.intersection(ranks):
            raise self._ended_error(rank, purpose, unit)

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, purpose: str, tensors: Mapping[int, torch.Tensor], *, unit: int = 0) -> None:
        """Send each rank a tensor (1-D, contiguous, on the CPU); they are copied before this returns.

        One that is the same for several ranks in a row is copied once. ``unit`` is the id of the tensors' unit, 0 for
        none; a rank that expects another unit raises, as this does if one of the ranks has ended.
        """
        self._check()
        for rank in self._peers:
            self.receive(rank)
        self._num_sends += 1
        copied = None
        for rank, tensor in tensors.items():
            if tensor is not copied:
                copied, nbytes = tensor, tensor.nbytes
                segment, start = self._allocate(nbytes)
                segment.memory[start : start + nbytes].view(tensor.dtype).copy_(tensor)
                segment.last_send, segment.is_empty = self._num_sends, False
                header = _Header(_POST, segment.fd, start, nbytes, _PURPOSES.index(purpose), unit, *Progress.place)
            self.sent_nbytes += nbytes
            segment.num_unread += 1
            if purpose == "transfer":
                self._unread_transfers[rank] += nbytes
            self.send_header(rank, header, () if rank in segment.known_to else (segment.fd,))
            segment.known_to.add(rank)
        for segment in self._segments.values():
            is_idle = segment.num_unread == 0 and segment.last_send < self._num_sends - _IDLE_SENDS
            if is_idle and not segment.is_empty:
                segment.release()

    def _allocate(self, nbytes: int) -> tuple[_Segment, int]:
        """Return a segment, and the start of memory in it that nobody reads."""
        aligned = -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        largest_free = None
        # Try small segments first, to keep large ones for messages that need them.
        for segment in sorted(self._segments.values(), key=attrgetter("nbytes")):
            if segment.num_unread == 0:
                segment.used, largest_free = 0, segment
            start = segment.used
            if start + aligned <= segment.nbytes:
                segment.used += aligned
                return segment, start
        whole_pages = -(-max(_SEGMENT_NBYTES, aligned) // mmap.PAGESIZE) * mmap.PAGESIZE
        if largest_free is None:
            largest_free = _Segment(whole_pages)
            self._segments[largest_free.fd] = largest_free
        else:
            largest_free.grow(whole_pages)
        largest_free.used = aligned
        return largest_free, 0

    def send_header(self, rank: int, header: _Header, fds: Sequence[int] = ()) -> None:
        """Send a header, unless connections are closed: at the end of the process, and in a forked child."""
        while rank in self._peers:
            try:
                if fds:
                    socket.send_fds(self._peers[rank], [_HEADER.pack(*header)], fds)
                else:
                    self._peers[rank].send(_HEADER.pack(*header))
                return
            except BlockingIOError:
                # The peer has many headers to read, and may itself be waiting until it can send one.
                others = [each for each in self._peers if each == rank or each not in self._ended_ranks]
                wait_for({self: others}, _PURPOSES[header.purpose], header.unit, writable_rank=rank)
            except ConnectionError as error:
                # A rank that has ended needs no confirmation that its message was read.
                if header.kind == _POST:
                    raise self._ended_error(rank, _PURPOSES[header.purpose], header.unit) from error
                return

    # -- receiving -----------------------------------------------------------------------------------------------

    def expect(
        self, purpose: str, sources: Sequence[int], like: torch.Tensor, read: Read, *, unit: int = 0
    ) -> Messages:
        """Expect a message like the tensor ``like`` from each source, the next after those expected before."""
        messages = Messages(self, list(sources), like.dtype, like.nbytes, purpose, unit, read, Progress.place)
        for source in sources:
            self._expected[source].append(messages)
            if self._early[source]:
                self.receive(source)
        return messages

    def receive(self, source: int) -> None:
        """Process all headers that have arrived from ``source``, without waiting."""
        early, expected = self._early[source], self._expected[source]
        while True:
            try:
                content, fds, flags, _ = socket.recv_fds(self._peers[source], _HEADER.size, 1)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # it has ended with unread headers; the ones that it sent before follow now
            if not content:
                self._ended_ranks.add(source)
                break
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
                _, self.theirs[source, header.segment] = _mapped(fds[0], os.fstat(fds[0]).st_size)
                os.close(fds[0])
            early.append(header)
        while early and expected and self._mismatch is None:
            header, messages = early.popleft(), expected.popleft()
            purpose = _PURPOSES[header.purpose]
            if (header.nbytes, purpose, header.unit) == (messages.nbytes, messages.purpose, messages.unit):
                messages.arrived[source] = header._replace(kind=_READ, unit=0)
                messages.missing.remove(source)
                continue
            theirs = f"{self.describe(purpose, header.unit)} ({header.nbytes} bytes)"
            ours = f"{self.describe(messages.purpose, messages.unit)} ({messages.nbytes} bytes)"
            self._mismatch = mismatch(source, theirs, Place(*header[-4:]), self.rank, ours, messages.place)
            failures.report_failure(self.rank_group, f"raised {type(self._mismatch).__name__}: {self._mismatch}")

    def describe(self, purpose: str, unit: int) -> str:
        """Describe a collective for error texts."""
        operation = _OPERATIONS[purpose]
        if not unit:
            return operation
        name = f"unit {self.names[unit]!r}" if unit in self.names else "another unit"
        return f"the {operation.partition(' ')[2]} of {name}"

    def absences(self) -> dict[int, tuple[type[Exception], str]]:
        """Return the ranks that have ended or are in a collective of another kind, each with an error and its text."""
        found: dict[int, tuple[type[Exception], str]] = {}
        for rank, early in self._early.items():
            self.receive(rank)
            if early:
                collective = self.describe(_PURPOSES[early[0].purpose], early[0].unit)
                where = f"{Place(*early[0][-4:])}; this rank is {Progress.place}"
                found[rank] = UsageError, f"goes on with {collective} ({where})"
            elif rank in self._ended_ranks:
                found[rank] = PeerFailureError, "has ended or closed its connections"
        return found

    def _ended_error(self, rank: int, purpose: str, unit: int) -> PeerFailureError:
        collective = self.describe(purpose, unit)
        if failures.has_failed(self.rank_group, [rank]):
            return failures.failure_in(collective, self.rank_group, f"rank {rank}, which has failed, has ended")
        return PeerFailureError(
            f"Rank {rank} of the group has ended or closed its connections while rank {self.rank} is in "
            f"{collective} ({Progress.place}). If the output of rank {rank} has an error, that came first and this one "
            f"follows from it; if it ended well, it made fewer steps than rank {self.rank}."
        )


def wait_for(
    sources: Mapping[SharedMemoryTransport, Collection[int]],
    purpose: str,
    unit: int = 0,
    *,
    writable_rank: int | None = None,
) -> None:
    """Wait until a header arrives from one of several ranks, and process all that have arrived.

    With a ``writable_rank``, one of them, the wait also ends once a header can be sent to it. Raises a PeerFailureError
    if a rank has ended or reported a failure, or all are silent for the group's timeout, and a RankMismatchError if
    ranks have issued different collectives.
    """
    poll = select.poll()
    for transport, ranks in sources.items():
        transport._check(ranks, purpose, unit)
        for rank in ranks:
            poll.register(transport._peers[rank], select.POLLIN | (select.POLLOUT if rank == writable_rank else 0))
    timeout_s = min(map(attrgetter("timeout_s"), sources))
    patience_s = min(failures.LOOK_AFTER_S, failures.WARN_AFTER_S, timeout_s)
    if not poll.poll(patience_s * 1000):
        until = time.monotonic() + timeout_s - patience_s
        transport, ranks = next(iter(sources.items()))
        group, collective = transport.rank_group, transport.describe(purpose, unit)

        def is_over(seconds: float) -> bool:
            left_s = until - time.monotonic()
            if left_s <= 0:
                silent = f"nothing has come from rank(s) {sorted(ranks)} within the group's {timeout_s:.0f} seconds"
                raise failures.failure_in(collective, group, silent)
            return bool(poll.poll(min(left_s, seconds) * 1000))

        failures.keep_waiting(is_over, group, ranks, collective)
    for transport, ranks in sources.items():
        for rank in tuple(ranks):
            transport.receive(rank)


def _mapped(fd: int, nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    shared = mmap.mmap(fd, nbytes)
    return shared, torch.frombuffer(shared, dtype=torch.uint8)


def close_all(peers: dict[int, socket.socket], files: Iterable[int] = ()) -> None:
    """Close sockets, and remove them; close file descriptors."""
    for peer in peers.values():
        peer.close()
    peers.clear()
    for fd in files:
        os.close(fd)
