"""Holds the communication state that all units of one root share.

The context is passed down: a unit uses its context and never looks up its root. It belongs to the runtime, not to
``comm``, because it also owns the memory pool of the flat buffers, and packages of one layer must not import each
other.
"""

from __future__ import annotations

import torch

from fsdp_flat.comm import CollectiveLog, Streams, streams_for
from fsdp_flat.flat import MemoryPool
from fsdp_flat.runtime.reduction import Reductions

__all__ = ["CommContext"]


class CommContext:
    """Holds the streams, memory pool, reductions in flight, and records of one tree of units.

    A unit starts with its own context; the root's first use replaces it with one for the tree.

    Args:
        device: the compute device.

    Attributes:
        streams: streams of every all-gather and reduce-scatter, shared so that each is ordered after the optimizer and
            the allocator can share blocks between units.
        pool: memory of the units' buffers while a step runs; empty between steps.
        reductions: reductions of the running backward.
        collectives: order of the collectives issued since ranks last compared it.
        trace: None, or a list to which ``(event, unit name)`` is appended: begin_unshard, finish_unshard, reshard,
            pre_backward, begin_reduce, pre_forward, post_forward, end_of_backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: Streams = streams_for(device)
        self.pool = MemoryPool()
        # Without streams, one reduction keeps the network busy and takes the least memory.
        self.reductions = Reductions(2 if self.streams.is_accelerator else 1)
        self.collectives = CollectiveLog()
        self.trace: list[tuple[str, str]] | None = None
