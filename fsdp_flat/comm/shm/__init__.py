"""Sends messages between the ranks of one host through shared memory.

The rest of the package uses only the names of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fsdp_flat.comm.shm.channel import SharedMemoryChannel, TransportQueue
from fsdp_flat.comm.shm.connect import known_transport, sent_nbytes, shared_nbytes, transport_of


class ExpectedMessage(Protocol):
    """Describes a message that a rank expects, as a ``Work`` that is complete when the message has arrived."""

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        ...

    def wait(self) -> None:
        """Block until the message has arrived.

        Raises:
            PeerFailureError: if the sender has ended, or sent nothing within the group's timeout.
            RankMismatchError: if the sender sent a different message.
        """
        ...

    def content(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the message (1-D, of ``dtype``) in the sender's memory.

        Do not write to it, nor use it after :meth:`close`.
        """
        ...

    def close(self) -> None:
        """Release the message, read or not, so that the sender may reuse its memory."""
        ...


class HostTransport(Protocol):
    """Describes the messages of this rank in one group, for one thread.

    Between two ranks, messages arrive in the order in which they were sent. A sender does not wait for readers. The
    purpose of a message is "gather", "reduction" or "transfer".
    """

    def send(self, purpose: str, messages: Sequence[tuple[torch.Tensor, Sequence[int]]], *, unit: int = 0) -> None:
        """Send tensors to ranks; they are copied before this returns.

        Args:
            purpose: purpose of the messages.
            messages: pairs of a tensor (1-D, contiguous, on the CPU) and its destination ranks.
            unit: id of the tensors' unit, 0 for none; a rank that expects another unit raises.

        Raises:
            PeerFailureError: if one of the ranks has ended.
        """
        ...

    def expect(self, purpose: str, source: int, nbytes: int, *, unit: int = 0) -> ExpectedMessage:
        """Expect a message from ``source``, the next after those expected before."""
        ...

    def unexpected(self) -> tuple[int, str] | None:
        """Return a rank that has sent an unexpected message, and its collective; None if there is none."""
        ...
