"""Implements transfers between ranks by messages through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.comm.shm.connect import transport_of
from fsdp_flat.comm.shm.transport import Messages, SharedMemoryTransport, wait_for

# Long runs are sent in parts, several of them unread, so that neither side waits for each part.
_PART_NBYTES = 1 << 22
_MOST_UNREAD_NBYTES = 1 << 24


class SharedMemoryChannel:
    """Sends and receives runs through shared memory; ``channels``, to which it adds itself, are those used together.

    A rank that waits in one of them reads messages of all; else ranks that wait in different groups could deadlock.
    """

    device = torch.device("cpu")

    def __init__(self, transport: SharedMemoryTransport, channels: list[SharedMemoryChannel]) -> None:
        self._transport = transport
        self._channels = channels
        self._expected: list[Messages] = []
        channels.append(self)

    def send(self, run: torch.Tensor, ranks: Sequence[int]) -> None:
        """Send a run to ranks; it is copied before this returns."""
        for part in _split_parts(run):
            # A rank that only sends would otherwise fill its memory with unread messages.
            most_nbytes = max(0, _MOST_UNREAD_NBYTES - part.nbytes)
            while sum((unread := self._transport.unread_transfers()).values()) > most_nbytes:
                self._wait_and_read({self._transport: set(unread)})
            self._transport.send("transfer", dict.fromkeys(ranks, part))

    def receive(self, run: torch.Tensor, source: int) -> None:
        """Begin to receive a run from a rank."""
        for part in _split_parts(run):
            self._expected.append(self._transport.expect("transfer", [source], part, partial(_copy, part)))

    def wait(self) -> None:
        """Block until all runs have been received."""
        while self._expected:
            self._wait_and_read({})

    def _wait_and_read(self, sources: dict[SharedMemoryTransport, set[int]]) -> None:
        """Read the messages that have arrived; if there are none, wait for one, or for a header from ``sources``."""
        has_read = False
        for channel in self._channels:
            for messages in tuple(channel._expected):
                if messages.missing:
                    sources.setdefault(messages.transport, set()).update(messages.missing)
                else:
                    messages.wait()
                    channel._expected.remove(messages)
                    has_read = True
        if not has_read:
            wait_for(sources, "transfer")


def channel_of(rank_group: RankGroup, channels: list[SharedMemoryChannel]) -> SharedMemoryChannel | None:
    """Return a channel for a group, to be used together with ``channels``; None if its ranks cannot share memory."""
    transport = transport_of(rank_group) if rank_group.size > 1 else None
    return None if transport is None else SharedMemoryChannel(transport, channels)


def _copy(target: torch.Tensor, messages: dict[int, torch.Tensor]) -> torch.Tensor:
    (message,) = messages.values()
    return target.copy_(message)


def _split_parts(run: torch.Tensor) -> Sequence[torch.Tensor]:
    # Sender and receiver have the same length and dtype, so they split alike.
    return run.split(_PART_NBYTES // run.itemsize) if run.nbytes > _PART_NBYTES else (run,)
