"""Defines the policies of ``fully_shard`` that say where shards are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OffloadPolicy:
    """Stands for no offloading; its subclass :class:`CPUOffloadPolicy` offloads."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps sharded parameters, gradients and so the optimizer's states in host memory.

    Attributes:
        pin_memory: accepted; host memory of an accelerator's shards is always pinned.
    """

    pin_memory: bool = True
