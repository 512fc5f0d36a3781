"""Exchanges tensors between the ranks of each host through shared memory.

The rest of the package uses only the names of this file.
"""

from fsdp_flat.comm.shm.connect import known_transport, shares_memory, transport_of, transports
from fsdp_flat.comm.shm.shared_channel import channel_of
from fsdp_flat.comm.shm.shared_collectives import SharedMemoryCollectives
