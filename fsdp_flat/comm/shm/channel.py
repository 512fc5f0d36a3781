"""Sends runs of elements through shared memory, in parts of which a few are in flight at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from fsdp_flat.comm.shm.transport import Message, SharedMemoryTransport, wait_for

# Long runs are sent in parts, several of them unread, so that neither side waits for each part.
_PART_NBYTES = 1 << 22
_MOST_UNREAD_NBYTES = 1 << 24


class TransportQueue:
    """Queues the messages in flight over all groups with transfers at the same time.

    Waiting for one group reads messages of all groups; otherwise ranks that wait for different groups could deadlock.
    """

    def __init__(self) -> None:
        # By transport and source rank, in the order in which they are sent.
        self._expected: dict[tuple[SharedMemoryTransport, int], deque[tuple[Message, torch.Tensor]]] = {}
        self._transports: set[SharedMemoryTransport] = set()

    def send(self, transport: SharedMemoryTransport, part: torch.Tensor, to: Sequence[int]) -> None:
        """Send ``part`` once enough of the earlier messages are read to bound the memory in use."""
        # Otherwise a rank that only sends would fill its memory with unread messages.
        self._transports.add(transport)
        most = max(0, _MOST_UNREAD_NBYTES - part.nbytes)
        if self._unread_nbytes() > most:
            self._read_until(lambda: self._unread_nbytes() <= most)
        transport.send("transfer", [(part, to)])

    def expect(self, transport: SharedMemoryTransport, part: torch.Tensor, source: int) -> None:
        """Expect a message from ``source``, for ``part``."""
        messages = self._expected.setdefault((transport, source), deque())
        messages.append((transport.expect("transfer", source, part.nbytes), part))

    def finish(self) -> None:
        """Block until all expected messages have arrived and all sent messages are read."""
        self._read_until(lambda: not self._expected and self._unread_nbytes() == 0)

    def _read_until(self, is_over: Callable[[], bool]) -> None:
        self._read()
        while not is_over():
            readers = {(transport, rank) for transport in self._transports for rank in transport.unread("transfer")}
            wait_for(readers.union(self._expected), "transfer")
            self._read()

    def _unread_nbytes(self) -> int:
        return sum(sum(transport.unread("transfer").values()) for transport in self._transports)

    def _read(self) -> None:
        """Read all messages that have arrived."""
        for place, messages in list(self._expected.items()):
            while messages and messages[0][0].is_completed():
                message, target = messages.popleft()
                target.copy_(message.content(target.dtype))
                message.close()
            if not messages:
                del self._expected[place]


class SharedMemoryChannel:
    """Sends and receives the runs of one group.

    Args:
        transport: the group's transport.
        queue: the queue shared with the channels of other groups.
    """

    device = torch.device("cpu")

    def __init__(self, transport: SharedMemoryTransport, queue: TransportQueue) -> None:
        self._transport = transport
        self._queue = queue

    def send(self, run: torch.Tensor, to: Sequence[int]) -> None:
        """Begin to send ``run`` to each rank of ``to``."""
        for part in _split_parts(run):
            self._queue.send(self._transport, part, to)

    def receive(self, run: torch.Tensor, source: int) -> None:
        """Begin to receive into ``run`` from rank ``source``."""
        for part in _split_parts(run):
            self._queue.expect(self._transport, part, source)

    def wait(self) -> None:
        """Block until all runs are received and the sent tensors are no longer in use."""
        self._queue.finish()


def _split_parts(run: torch.Tensor) -> Sequence[torch.Tensor]:
    # Sender and receiver have the same length and dtype, so they split alike.
    return run.split(_PART_NBYTES // run.itemsize) if run.nbytes > _PART_NBYTES else (run,)
