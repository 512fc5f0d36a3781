"""Creates one shared-memory transport for each group whose ranks are all on one host."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import secrets
import socket
import struct
import weakref
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_flat.comm.exchanges import exchange_bytes, exchange_ints
from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.comm.shm.transport import SharedMemoryTransport, close_all
from fsdp_flat.comm.torch_comm import timeout_of

_logger = logging.getLogger("fsdp_flat")
_CPU = torch.device("cpu")
# Each rank has a socket to every other rank, and a few open files of each.
_MOST_RANKS = 16
_SETUP_S = 10.0

# Process-wide like torch's groups, so that all units of a group share one transport.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemoryTransport | None] = weakref.WeakKeyDictionary()


def transport_of(rank_group: RankGroup) -> SharedMemoryTransport | None:
    """Return the transport of a group of more than one rank; None if its ranks cannot share memory.

    At most 16 ranks can, if they run on one Linux kernel as one user, in one network namespace, and the environment
    variable ``FSDP_FLAT_SHARED_MEMORY`` is not 0 on any of them. The first call for a group is a collective: every
    rank of the group must make it at the same point.
    """
    group = rank_group.group
    assert group is not None
    if group not in _transports:
        _transports[group] = _connect(rank_group, group)
        way = "gloo" if _transports[group] is None else "shared memory"
        _logger.info("rank %d of a group of %d: tensors on the CPU move by %s", rank_group.rank, rank_group.size, way)
    return _transports[group]


def known_transport(rank_group: RankGroup) -> SharedMemoryTransport | None:
    """Return the transport of a group if :func:`transport_of` has created one, else None."""
    return None if rank_group.group is None else _transports.get(rank_group.group)


def transports() -> list[SharedMemoryTransport]:
    """Return the transports of this process."""
    return [transport for transport in _transports.values() if transport is not None]


def _leave_parents_groups() -> None:
    """Close the parent's connections in a forked child, so that peers can detect that the parent has ended."""
    for transport in transports():
        transport.leave()


os.register_at_fork(after_in_child=_leave_parents_groups)


def _connect(rank_group: RankGroup, group: dist.ProcessGroup) -> SharedMemoryTransport | None:
    """Connect all ranks of a group, or none."""
    timeout_s = timeout_of(group).total_seconds()
    # Ranks wait for one that cannot connect, and must still reach the next collective within the group's timeout.
    listener = _listen(min(_SETUP_S, timeout_s / 4)) if rank_group.size <= _MOST_RANKS else None
    own = b"" if listener is None else b"%s %s" % (_host(), listener.getsockname())
    peers: dict[int, socket.socket] = {}
    try:
        each_rank = [payload.split(b" ") for payload in exchange_bytes(own, group, _CPU)]
        if listener is not None and len({host for host, *_ in each_rank}) == 1:
            with suppress(OSError, ValueError):
                _connect_peers(rank_group, listener, [address for _, address in each_rank], peers)
    finally:
        if listener is not None:
            listener.close()
    if all(ok for (ok,) in exchange_ints([int(len(peers) == rank_group.size - 1)], group, _CPU)):
        return SharedMemoryTransport(rank_group, peers, timeout_s)
    close_all(peers)
    return None


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


def _connect_peers(
    rank_group: RankGroup, listener: socket.socket, addresses: list[bytes], peers: dict[int, socket.socket]
) -> None:
    """Add a socket to every other rank to ``peers``; each rank connects to the lower ones, and sends its rank."""
    for rank in range(rank_group.rank):
        peers[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[rank].settimeout(listener.gettimeout())
        peers[rank].connect(addresses[rank])
        peers[rank].send(b"%d" % rank_group.rank)
    while len(peers) < rank_group.size - 1:
        peer, _ = listener.accept()
        peer.settimeout(listener.gettimeout())
        # struct ucred: process, user, group.
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user == os.getuid():
            peers[int(peer.recv(16))] = peer
        else:
            peer.close()
    for peer in peers.values():
        peer.setblocking(False)
