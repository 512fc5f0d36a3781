"""Creates the shared-memory transports of a group: one between all ranks, or two within each of several hosts."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_flat.comm.exchanges import exchange_bytes, exchange_ints
from fsdp_flat.comm.rank_groups import RankGroup, new_groups_of
from fsdp_flat.comm.shm.transport import SharedMemoryTransport, close_all
from fsdp_flat.comm.torch_comm import timeout_of

_logger = logging.getLogger("fsdp_flat")
# Each rank has a socket to every other rank, and a few open files of each.
_MOST_RANKS = 16
_SETUP_S = 10.0


@dataclass(frozen=True, slots=True)
class Hosts:
    """Describes a group whose ranks are on several hosts, and share memory within each.

    Attributes:
        ranks: the ranks of the group by host, in the order of the hosts' first ranks.
        direct: exchanges tensors of this rank within its host.
        relayed: exchanges tensors of other hosts within this host.
        gather_groups: two process groups of this rank's rail, the ranks in its position of each host. One is for what
            lower ranks send to higher ones, the other for what those send.
        reduce_groups: two more, for reduce-scatters.
        gathers, sums: all-gathers and reduce-scatters of all units whose second part has not begun, oldest first.
    """

    ranks: list[list[int]]
    direct: SharedMemoryTransport
    relayed: SharedMemoryTransport
    gather_groups: tuple[RankGroup, RankGroup]
    reduce_groups: tuple[RankGroup, RankGroup]
    gathers: deque[Any] = field(default_factory=deque)
    sums: deque[Any] = field(default_factory=deque)


def local_ranks(hosts: list[list[int]], rank: int) -> list[int]:
    """Return the ranks of a rank's host."""
    return next(ranks for ranks in hosts if rank in ranks)


def rail_of(hosts: list[list[int]], rank: int) -> list[int]:
    """Return the ranks of a rank's rail."""
    position = local_ranks(hosts, rank).index(rank)
    return sorted(ranks[position] for ranks in hosts)


# Process-wide like torch's groups, so that all units of a group share one transport.
_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemoryTransport | Hosts | None] = (
    weakref.WeakKeyDictionary()
)


def transport_of(rank_group: RankGroup) -> SharedMemoryTransport | None:
    """Return the transport between all ranks of a group; None if they cannot all share memory (:func:`connect`)."""
    connection = connect(rank_group)
    return connection if isinstance(connection, SharedMemoryTransport) else None


def connect(rank_group: RankGroup) -> SharedMemoryTransport | Hosts | None:
    """Return the transport between all ranks of a group of more than one, or hosts of equally many ranks.

    At most 16 ranks share memory, if they run on one Linux kernel as one user, in one network namespace, and the
    environment variable ``FSDP_FLAT_SHARED_MEMORY`` is not 0 on any of them; None if ranks of a host cannot. The first
    call for a group is a collective: every rank of the group must make it at the same point.
    """
    group = rank_group.process_group
    if group not in _connections:
        connection = _connections[group] = _connect(rank_group)
        way = "gloo" if connection is None else "shared memory"
        if isinstance(connection, Hosts):
            way = f"shared memory within each of {len(connection.ranks)} hosts, and by gloo once between them"
        _logger.info("rank %d of a group of %d: tensors on the CPU move by %s", rank_group.rank, rank_group.size, way)
    return _connections[group]


def known_transport(rank_group: RankGroup) -> SharedMemoryTransport | None:
    """Return the transport between the ranks of this host in a group whose ranks have connected, or None."""
    connection = None if rank_group.group is None else _connections.get(rank_group.group)
    return connection.direct if isinstance(connection, Hosts) else connection


def shares_memory(rank_group: RankGroup) -> bool:
    """Return whether all ranks of a group have connected through shared memory."""
    return rank_group.group is not None and isinstance(_connections.get(rank_group.group), SharedMemoryTransport)


def transports() -> list[SharedMemoryTransport]:
    """Return the transports of this process."""
    found: list[SharedMemoryTransport] = []
    for connection in _connections.values():
        if isinstance(connection, Hosts):
            found += [connection.direct, connection.relayed]
        elif connection is not None:
            found.append(connection)
    return found


def _leave_parents_groups() -> None:
    """Close the parent's connections in a forked child, so that peers can detect that the parent has ended."""
    for transport in transports():
        transport.leave()


os.register_at_fork(after_in_child=_leave_parents_groups)


def _connect(rank_group: RankGroup) -> SharedMemoryTransport | Hosts | None:
    """Connect all ranks of each host, or none."""
    hosts, direct = _connect_hosts(rank_group)
    if direct is None or len(hosts) == 1:
        return direct
    _, relayed = _connect_hosts(rank_group)
    if relayed is None:
        direct.leave()
        return None
    up, down, reduce_up, reduce_down = new_groups_of(rank_group, rail_of(hosts, rank_group.rank), 4)
    return Hosts(hosts, direct, relayed, (up, down), (reduce_up, reduce_down))


def _connect_hosts(
    rank_group: RankGroup,
) -> tuple[list[list[int]], SharedMemoryTransport | None]:
    """Return the ranks by host, and the transport of this rank's host; None if ranks cannot or need not connect."""
    timeout_s = timeout_of(rank_group.process_group).total_seconds()
    # Ranks wait for one that cannot connect, and must still reach the next collective within the group's timeout.
    listener = _listen(min(_SETUP_S, timeout_s / 4))
    own = b"" if listener is None else b"%s %s" % (_host(), listener.getsockname())
    peers: dict[int, socket.socket] = {}
    by_host: dict[bytes, list[int]] = {}
    try:
        addresses = []
        for rank, payload in enumerate(exchange_bytes(own, rank_group, "connecting ranks of a host")):
            host, _, address = payload.partition(b" ")
            by_host.setdefault(host, []).append(rank)
            addresses.append(address)
        hosts = list(by_host.values())
        num_local = {len(ranks) for ranks in hosts}
        if not all(addresses) or len(num_local) > 1 or not 1 < max(num_local) <= _MOST_RANKS:
            return hosts, None
        local = local_ranks(hosts, rank_group.rank)
        assert listener is not None
        with suppress(OSError, ValueError):
            _connect_peers(rank_group, local, listener, addresses, peers)
    finally:
        if listener is not None:
            listener.close()
    if all(ok for (ok,) in exchange_ints([int(len(peers) == len(local) - 1)], rank_group)):
        return hosts, SharedMemoryTransport(rank_group, peers, timeout_s)
    close_all(peers)
    return hosts, None


@functools.cache
def _host() -> bytes:
    """Return an id of the running kernel, its network namespace and the user, equal on ranks that can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return b"%s-%d-%d" % (boot, os.stat("/proc/self/ns/net").st_ino, os.getuid())


def _shares_memory() -> bool:
    """Return whether the system has the required calls, as Linux does, and lets this process share memory."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "send_fds") and hasattr(mmap, "MADV_REMOVE")):
        return False
    fd = os.memfd_create("fsdp_flat")
    try:
        os.ftruncate(fd, 1 << 22)  # as much as messages need at first; a limit of the process may forbid it
    finally:
        os.close(fd)
    return True


def _listen(timeout_s: float) -> socket.socket | None:
    if os.environ.get("FSDP_FLAT_SHARED_MEMORY") == "0":
        return None
    with suppress(OSError):
        if _shares_memory() and _host():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(b"\0fsdp_flat-" + secrets.token_hex(16).encode())
            listener.listen(_MOST_RANKS)
            listener.settimeout(timeout_s)
            return listener
    return None


def _connected(address: bytes, stop: float) -> socket.socket:
    """Connect to a listener, whose queue may be full of others until ``stop``."""
    while True:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        try:
            made.connect(address)
            return made
        except OSError as error:
            made.close()
            if not isinstance(error, BlockingIOError) or time.monotonic() > stop:
                raise
            time.sleep(0.001)


def _ready(sockets: list[socket.socket], stop: float) -> list[socket.socket]:
    """Wait for sockets that can be read; raise a TimeoutError after ``stop``."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {number for number, _ in poll.poll(1000 * max(0.0, stop - time.monotonic()))}
    if time.monotonic() > stop:
        raise TimeoutError
    return [each for each in sockets if each.fileno() in ready]


def _accepted(listener: socket.socket) -> list[socket.socket]:
    """Accept a connection; return it unless it is of another user."""
    made, _ = listener.accept()
    # struct ucred: process, user, group.
    _, user, _ = struct.unpack("3i", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user == os.getuid():
        return [made]
    made.close()
    return []


def _connect_peers(
    rank_group: RankGroup,
    local: list[int],
    listener: socket.socket,
    addresses: list[bytes],
    peers: dict[int, socket.socket],
) -> None:
    """Add a socket to every other rank of this host to ``peers``; each connects to lower ones, and sends its rank.

    Others may connect too: those of another user are closed, and those that say nothing are not waited for.
    """
    stop = time.monotonic() + (listener.gettimeout() or 0.0)
    for rank in local[: local.index(rank_group.rank)]:
        peers[rank] = _connected(addresses[rank], stop)
        peers[rank].send(b"%d" % rank_group.rank)
    unknown: list[socket.socket] = []
    try:
        while len(peers) < len(local) - 1:
            for each in _ready([listener, *unknown], stop):
                if each is listener:
                    unknown += _accepted(listener)
                    continue
                unknown.remove(each)
                said = each.recv(16)
                rank = int(said) if said.isdigit() else -1
                if rank in local and rank > rank_group.rank and rank not in peers:
                    peers[rank] = each
                else:
                    each.close()
    finally:
        for each in unknown:
            each.close()
    for peer in peers.values():
        peer.setblocking(False)
