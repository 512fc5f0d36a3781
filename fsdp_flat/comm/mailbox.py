"""Messages between the ranks of one host, through memory that they share.

Loopback sockets copy every byte twice inside the kernel and wake a thread for it on either side. Here a rank copies
what it sends into memory that its peers have mapped too, and tells them where it lies; they read it in place when
they need it. A note is one datagram over a socket of the two ranks, which also orders the memory accesses of both
sides, says at once when a rank has ended, and carries the file descriptor of memory that the other does not know yet.
Nothing has a name in the file system, so nothing is left behind however a rank ends.

Between two ranks, messages arrive in the order in which they were sent. A sender never waits for a reader: memory that
somebody has not read yet is not used again, other memory is taken.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from fsdp_flat.comm.agreement import exchange_bytes, exchange_ints
from fsdp_flat.comm.groups import Axis
from fsdp_flat.errors import PeerFailureError, RankMismatchError

__all__ = ["Letter", "Mailbox", "mailbox_of", "sent_nbytes", "shared_nbytes"]

_CPU = torch.device("cpu")
# Every rank has a socket to every other one, and a few files of each.
_MOST_RANKS = 16
# Messages of one segment begin at multiples of this, so that any dtype may lie there.
_ALIGN_NBYTES = 64
# Messages after which memory that none of them needed is given back to the system.
_IDLE_SENDS = 64

_POST, _READ = 0, 1
_NOTE = struct.Struct("<qqqqq")  # kind, segment, start, nbytes, purpose
_HELLO = struct.Struct("<q")  # rank
_CREDENTIALS = struct.Struct("3i")  # process, user, group: struct ucred of SO_PEERCRED
_SETUP_S = 60.0


class Letter:
    """A message that a rank expects. It is a ``Work``, which is over when the message is there.

    Args:
        mailbox: where it arrives.
        source: rank of the axis that sends it.
        nbytes: its length.
        purpose: what it is for, in a word.
    """

    __slots__ = ("__weakref__", "_mailbox", "_place", "nbytes", "purpose", "source")

    def __init__(self, mailbox: Mailbox, source: int, nbytes: int, purpose: str) -> None:
        self._mailbox = mailbox
        self._place: tuple[int, int] | None = None
        self.source = source
        self.nbytes = nbytes
        self.purpose = purpose

    @property
    def is_there(self) -> bool:
        """Whether the message was taken in."""
        return self._place is not None

    def is_completed(self) -> bool:
        """Whether the message has come."""
        if self._place is None:
            self._mailbox.look(self.source)
        return self._place is not None

    def wait(self) -> None:
        """Block until the message is there.

        Raises:
            PeerFailureError: the sender has ended, or nothing came within the group's timeout.
            RankMismatchError: the sender sent something else.
        """
        while self._place is None:
            self._mailbox.wait_for((self.source,), self.purpose)

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
            self._mailbox.tell(self.source, _READ, segment, start, self.nbytes, _number(self.purpose))

    __del__ = close


class _Segment:
    """Memory of this rank that others may read.

    Attributes:
        fd: the file descriptor, by which others map it.
        memory: all of it (1-D, uint8).
        known_to: ranks that have the file descriptor.
        num_unread: messages in it that somebody has still to read.
        last_send: number of the send that used it last.
        is_empty: it has no pages, since it was idle for long.
    """

    __slots__ = ("_map", "fd", "index", "is_empty", "known_to", "last_send", "memory", "num_unread")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.fd = os.memfd_create("fsdp_flat")
        self.known_to: set[int] = set()
        self.num_unread = 0
        self.last_send = 0
        self.is_empty = False
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Have more bytes; those who have mapped it map it again when they see a message beyond what they know."""
        os.ftruncate(self.fd, nbytes)
        self._map, self.memory = _mapped(self.fd, nbytes)

    def release(self) -> None:
        """Give the pages back to the system; they come back, as zeros, when somebody writes."""
        self._map.madvise(mmap.MADV_REMOVE)
        self.is_empty = True


class Mailbox:
    """This rank's end of the connections of one axis, for one thread. Made by :func:`mailbox_of`.

    Args:
        axis: the ranks.
        peers: a connected, non-blocking socket to every other rank.
        timeout_s: seconds after which a rank that sends nothing is given up.

    Attributes:
        sent_nbytes: bytes that were sent so far, once for each rank they went to.
    """

    def __init__(self, axis: Axis, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.sent_nbytes = 0
        self._rank = axis.rank
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._num_sends = 0
        self._segments: list[_Segment] = []
        self._theirs: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        # Expected messages that have not come, and notes of those that came before they were expected, in order.
        self._expected: dict[int, deque[weakref.ref[Letter]]] = {rank: deque() for rank in peers}
        self._early: dict[int, deque[tuple[int, int, int, int]]] = {rank: deque() for rank in peers}
        self._unread = [dict.fromkeys(peers, 0) for _ in _PURPOSES]
        # Ranks that have ended, so that nothing more comes from them.
        self._gone: set[int] = set()
        self._files: list[int] = []
        weakref.finalize(self, _close, list(peers.values()), self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shared memory that are in use or kept for the next messages."""
        return sum(segment.memory.numel() for segment in self._segments if not segment.is_empty)

    def unread(self, purpose: str) -> dict[int, int]:
        """By rank, bytes that were sent to it for ``purpose`` and that it is not known to have read, if any."""
        return {rank: nbytes for rank, nbytes in self._unread[_number(purpose)].items() if nbytes}

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, purpose: str, messages: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> None:
        """Send each tensor (1-D, contiguous, on the CPU) to the ranks beside it; it is copied before this returns.

        Raises:
            PeerFailureError: one of them has ended.
        """
        starts, total = [], 0
        for tensor, _ in messages:
            starts.append(total)
            total += -(-tensor.nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        segment = self._free_segment(total)
        for (tensor, ranks), start in zip(messages, starts, strict=True):
            nbytes = tensor.nbytes
            segment.memory[start : start + nbytes].view(tensor.dtype).copy_(tensor)
            for rank in ranks:
                self._post(rank, segment, start, nbytes, purpose)

    def _free_segment(self, nbytes: int) -> _Segment:
        for rank in self._peers:
            self.look(rank)
        self._num_sends += 1
        free = [segment for segment in self._segments if segment.num_unread == 0]
        fitting = [segment for segment in free if segment.memory.numel() >= nbytes]
        if fitting:
            chosen = min(fitting, key=lambda segment: segment.memory.numel())
        elif free:
            chosen = max(free, key=lambda segment: segment.memory.numel())
            chosen.grow(_whole_pages(nbytes))
        else:
            chosen = _Segment(len(self._segments), _whole_pages(nbytes))
            self._segments.append(chosen)
            self._files.append(chosen.fd)
        chosen.last_send = self._num_sends
        chosen.is_empty = False
        for segment in free:
            if not segment.is_empty and segment.last_send < self._num_sends - _IDLE_SENDS:
                segment.release()
        return chosen

    def _post(self, rank: int, segment: _Segment, start: int, nbytes: int, purpose: str) -> None:
        self.sent_nbytes += nbytes
        segment.num_unread += 1
        self._unread[_number(purpose)][rank] += nbytes
        fds = () if rank in segment.known_to else (segment.fd,)
        segment.known_to.add(rank)
        self.tell(rank, _POST, segment.index, start, nbytes, _number(purpose), fds)

    def tell(
        self,
        rank: int,
        kind: int,
        segment: int,
        start: int,
        nbytes: int,
        purpose: int,
        fds: Sequence[int] = (),
    ) -> None:
        """Send a note."""
        note = _NOTE.pack(kind, segment, start, nbytes, purpose)
        while True:
            try:
                if fds:
                    socket.send_fds(self._peers[rank], [note], list(fds))
                else:
                    self._peers[rank].send(note)
                return
            except BlockingIOError:
                # The other side has many notes to read, and may be waiting for room for one of its own.
                poll = select.poll()
                poll.register(self._peers[rank], select.POLLIN | select.POLLOUT)
                poll.poll(self._timeout_s * 1000)
                self.look(rank)
            except OSError as error:
                # Who has ended need not know what was read of theirs.
                if kind == _POST:
                    raise self._ended(rank) from error
                return

    # -- receiving -----------------------------------------------------------------------------------------------

    def expect(self, purpose: str, source: int, nbytes: int) -> Letter:
        """The next message of ``source`` that nobody expects yet."""
        letter = Letter(self, source, nbytes, purpose)
        early = self._early[source]
        if early:
            self._deliver(letter, *early.popleft())
        else:
            self._expected[source].append(weakref.ref(letter))
        return letter

    def _deliver(self, letter: Letter, segment: int, start: int, nbytes: int, purpose: int) -> None:
        letter.arrive(segment, start)
        if nbytes != letter.nbytes or purpose != _number(letter.purpose):
            raise RankMismatchError(
                f"Rank {letter.source} of the group sent {nbytes} bytes of a {_name(purpose)} where rank {self._rank} "
                f"expects {letter.nbytes} bytes of a {letter.purpose}: they do not run the same units in the same "
                "order. Check that every rank builds the same model and takes the same branches, and that an "
                "exception on one rank alone was not caught."
            )

    def look(self, source: int) -> None:
        """Take in what has come from ``source``, without waiting."""
        while True:
            try:
                note, fds, _, _ = socket.recv_fds(self._peers[source], _NOTE.size, 1)
            except BlockingIOError:
                return
            except OSError:
                note, fds = b"", []
            if not note:
                self._gone.add(source)
                return
            kind, segment, start, nbytes, purpose = _NOTE.unpack(note)
            if kind == _READ:
                self._segments[segment].num_unread -= 1
                self._unread[purpose][source] -= nbytes
                continue
            if fds:
                os.set_inheritable(fds[0], False)
                self._files.append(fds[0])
                self._theirs[source, segment] = (fds[0], torch.empty(0, dtype=torch.uint8))
            self._take_in(source, segment, start, nbytes, purpose)

    def _take_in(self, source: int, segment: int, start: int, nbytes: int, purpose: int) -> None:
        expected = self._expected[source]
        if not expected:
            self._early[source].append((segment, start, nbytes, purpose))
            return
        letter = expected.popleft()()
        if letter is None:
            self.tell(source, _READ, segment, start, nbytes, purpose)  # nobody waits for it any more
        else:
            self._deliver(letter, segment, start, nbytes, purpose)

    def wait_for(self, ranks: Collection[int], purpose: str) -> None:
        """Wait until something comes from one of ``ranks``, and take it in.

        Raises:
            PeerFailureError: one of them has ended, or nothing came within the group's timeout.
        """
        for rank in ranks:
            if rank in self._gone:
                raise self._ended(rank)
        poll = select.poll()
        for rank in ranks:
            poll.register(self._peers[rank], select.POLLIN)
        if not poll.poll(self._timeout_s * 1000):
            raise PeerFailureError(
                f"Rank {self._rank} of the group has waited for rank(s) {sorted(ranks)} in a {purpose} for the "
                f"{self._timeout_s:.0f} seconds of the group's timeout. They hang, or have not come to this "
                "collective: every rank must run the same units in the same order."
            )
        for rank in ranks:
            self.look(rank)

    def _ended(self, rank: int) -> PeerFailureError:
        return PeerFailureError(
            f"Rank {rank} of the group has ended while rank {self._rank} exchanges tensors with it. Look for the first "
            f"error in the output of rank {rank}; this one only follows from it."
        )

    def view(self, source: int, segment: int, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of a segment of another rank's."""
        fd, memory = self._theirs[source, segment]
        if memory.numel() < start + nbytes:
            _, memory = _mapped(fd, os.fstat(fd).st_size)
            self._theirs[source, segment] = (fd, memory)
        return memory[start : start + nbytes]


_PURPOSES = ("gather", "reduction", "transfer")


def _number(purpose: str) -> int:
    return _PURPOSES.index(purpose)


def _name(number: int) -> str:
    return _PURPOSES[number]


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _mapped(fd: int, nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    shared = mmap.mmap(fd, nbytes)
    return shared, torch.frombuffer(shared, dtype=torch.uint8)


def _close(sockets: list[socket.socket], files: list[int]) -> None:
    for peer in sockets:
        peer.close()
    for fd in files:
        os.close(fd)


# -- meeting -----------------------------------------------------------------------------------------------------

# As torch keeps its groups: whichever unit of a group comes first, there is one mailbox.
_mailboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox | None] = weakref.WeakKeyDictionary()


def mailbox_of(axis: Axis) -> Mailbox | None:
    """The mailbox of an axis of more than one rank; None where its ranks cannot share memory.

    They can if all run on one Linux kernel as one user, in one network namespace, unless the environment variable
    ``FSDP_FLAT_SHARED_MEMORY`` is 0 for any of them. The first call for a group is a collective: every rank of it must
    make it at the same point.
    """
    assert axis.group is not None
    if axis.group not in _mailboxes:
        _mailboxes[axis.group] = _connect(axis, axis.group)
    return _mailboxes[axis.group]


def shared_nbytes() -> int:
    """Bytes of this process that its mailboxes use or keep for the next messages."""
    return sum(mailbox.nbytes for mailbox in _mailboxes.values() if mailbox is not None)


def sent_nbytes() -> int:
    """Bytes that this process has sent by its mailboxes, once for each rank they went to."""
    return sum(mailbox.sent_nbytes for mailbox in _mailboxes.values() if mailbox is not None)


def _connect(axis: Axis, group: dist.ProcessGroup) -> Mailbox | None:
    """Connect all ranks, or none of them."""
    listener = _listen() if axis.size <= _MOST_RANKS else None
    said = b"" if listener is None else b"%s %s" % (_host(), listener.getsockname())
    everyone = exchange_bytes(said, group, _CPU)
    peers: dict[int, socket.socket] = {}
    if listener is not None:
        if len({said.split(b" ")[0] for said in everyone}) == 1:
            with suppress(OSError):
                _meet(axis, listener, [said.split(b" ")[1] for said in everyone], peers)
        listener.close()
    connected = exchange_ints([int(len(peers) == axis.size - 1)], group, _CPU)
    if not all(row[0] for row in connected):
        _close(list(peers.values()), [])
        return None
    return Mailbox(axis, peers, group._get_backend(_CPU).options._timeout.total_seconds())


def _host() -> bytes:
    """What ranks must have in common: the running kernel, the namespace of its socket names, and the user."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        boot = file.read().strip()
    return b"%s-%d-%d" % (boot, os.stat("/proc/self/ns/net").st_ino, os.getuid())


def _shares_memory() -> bool:
    """Whether this system has what is needed here: Linux has."""
    return hasattr(os, "memfd_create") and hasattr(socket, "send_fds") and hasattr(mmap, "MADV_REMOVE")


def _listen() -> socket.socket | None:
    if os.environ.get("FSDP_FLAT_SHARED_MEMORY") == "0" or not _shares_memory():
        return None
    try:
        _host()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(b"\0fsdp_flat-" + secrets.token_hex(16).encode())
        listener.listen(_MOST_RANKS)
        listener.settimeout(_SETUP_S)
    except OSError:
        return None
    return listener


def _meet(axis: Axis, listener: socket.socket, addresses: list[bytes], peers: dict[int, socket.socket]) -> None:
    """Put a socket to every other rank into ``peers``: later ranks call earlier ones."""
    for rank in range(axis.rank):
        peers[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[rank].settimeout(_SETUP_S)
        peers[rank].connect(addresses[rank])
        peers[rank].send(_HELLO.pack(axis.rank))
    while len(peers) < axis.size - 1:
        peer, _ = listener.accept()
        peer.settimeout(_SETUP_S)
        _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user == os.getuid():
            peers[_HELLO.unpack(peer.recv(_HELLO.size))[0]] = peer
        else:
            peer.close()
    for peer in peers.values():
        peer.setblocking(False)
