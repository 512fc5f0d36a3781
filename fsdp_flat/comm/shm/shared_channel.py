"""Implements transfers between ranks by messages through shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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

    Waiting for one reads messages of all of them; otherwise ranks that wait for different groups could deadlock.
    """

    device = torch.device("cpu")

    def __init__(self, transport: SharedMemoryTransport, channels: list[SharedMemoryChannel]) -> None:
        self._transport = transport
        self._channels = channels
        # By source rank, in the order in which they are sent.
        self._expected: dict[int, deque[Messages]] = {}
        channels.append(self)

    def send(self, run: torch.Tensor, ranks: Sequence[int]) -> None:
        """Send a run to ranks; it is copied before this returns."""
        for part in _split_parts(run):
            # A rank that only sends would otherwise fill its memory with unread messages.
            has_too_much = partial(self._has_unread, max(0, _MOST_UNREAD_NBYTES - part.nbytes))
            if has_too_much():
                self._read_while(has_too_much)
            self._transport.send("transfer", [(part, ranks)])

    def receive(self, run: torch.Tensor, source: int) -> None:
        """Begin to receive a run from a rank."""
        messages = self._expected.setdefault(source, deque())
        for part in _split_parts(run):
            messages.append(self._transport.expect("transfer", [source], part, partial(_copy, part)))

    def wait(self) -> None:
        """Block until all runs have been received, and those that were sent are read."""
        self._read_while(lambda: bool(self._expected or self._transport.unread_transfers()))

    def _has_unread(self, most_nbytes: int) -> bool:
        """Return whether other ranks have not read more than ``most_nbytes`` of what this rank has sent."""
        return sum(sum(each._transport.unread_transfers().values()) for each in self._channels) > most_nbytes

    def _read_while(self, is_waiting: Callable[[], bool]) -> None:
        self._read()
        while is_waiting():
            wait_for(
                {each._transport: {*each._expected, *each._transport.unread_transfers()} for each in self._channels},
                "transfer",
            )
            self._read()

    def _read(self) -> None:
        """Read all messages that have arrived."""
        for each in self._channels:
            for source, messages in list(each._expected.items()):
                while messages and messages[0].is_completed():
                    messages.popleft().wait()
                if not messages:
                    del each._expected[source]


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
