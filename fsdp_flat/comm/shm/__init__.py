"""Sends messages between the ranks of one host through shared memory; the rest of the package uses only these names."""

from fsdp_flat.comm.shm.channel import SharedMemoryChannel, TransportQueue
from fsdp_flat.comm.shm.connect import known_transport, sent_nbytes, shared_nbytes, transport_of
from fsdp_flat.comm.shm.interface import ExpectedMessage, HostTransport

__all__ = [
    "ExpectedMessage",
    "HostTransport",
    "SharedMemoryChannel",
    "TransportQueue",
    "known_transport",
    "sent_nbytes",
    "shared_nbytes",
    "transport_of",
]
