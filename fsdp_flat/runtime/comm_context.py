"""State that all units of one root share. It is passed down: a unit uses its context and never looks for its root.

The context is part of the runtime, not of the collectives' package, because it also owns the memory pool of the flat
buffers; of packages on one layer neither may import the other.
"""

from __future__ import annotations

import torch

from fsdp_flat.comm import CollectiveLog, Streams, streams_for
from fsdp_flat.flat import MemoryPool
from fsdp_flat.runtime.reduction import Reductions

__all__ = ["CommContext"]


class CommContext:
    """Streams, memory, reductions in flight, and records of one tree of units.

    A unit starts with a context of its own; the root's first use replaces it by one for the whole tree.

    Args:
        device: the compute device.

    Attributes:
        streams: those of every all-gather and reduce-scatter, so that each is ordered after the optimizer and the
            allocator may share blocks between units.
        pool: memory of the units' buffers while a step runs; empty between steps.
        reductions: those of the running backward.
        collectives: order in which collectives were issued since ranks last compared it.
        trace: None, or a list to which ``(event, unit name)`` is appended: begin_unshard, finish_unshard, reshard,
            pre_backward, begin_reduce, pre_forward, post_forward, end_of_backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: Streams = streams_for(device)
        self.pool = MemoryPool()
        # Without streams one is enough to keep the network busy, and it takes the least memory.
        self.reductions = Reductions(2 if self.streams.is_accelerator else 1)
        self.collectives = CollectiveLog()
        self.trace: list[tuple[str, str]] | None = None
