"""Defines the configuration of a handle and the states of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

__all__ = ["LEGAL_MOVES", "HandleSpec", "ShardState"]


class ShardState(Enum):
    """Enumerates the states of a handle's parameters."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"

    # By identity: Enum's own hash takes longer than the transition that uses it.
    __hash__ = object.__hash__


# Transitions that the handle makes; any other one is a defect of the library.
LEGAL_MOVES = {
    (ShardState.SHARDED, ShardState.UNSHARDING),
    (ShardState.UNSHARDING, ShardState.UNSHARDED),
    (ShardState.UNSHARDED, ShardState.SHARDED),
}


@dataclass(frozen=True, slots=True)
class HandleSpec:
    """Configures a handle.

    Attributes:
        unit_name: name of the unit, for error texts.
        module: the unit's module, inside wrappers for checkpoints and compilation; it registers the flat parameter.
        rank: this rank in the shard group.
        world_size: size of the shard group.
        num_ranks: ranks over which gradients are averaged; the tail of an unsharded layout is padded to a multiple.
        use_orig_params: the constructor's argument.
        device: compute device.
        shard_device: device of the shard and its gradient.
        compute_dtype: dtype of the unsharded parameters; None keeps the original one.
        reduce_dtype: dtype in which gradients are reduced; None follows ``compute_dtype``.
        master_dtype: dtype of the shard; None keeps the original one.
        keep_reduce_dtype: sharded gradients stay in ``reduce_dtype``.
    """

    unit_name: str
    module: nn.Module
    rank: int
    world_size: int
    num_ranks: int
    use_orig_params: bool
    device: torch.device
    shard_device: torch.device
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    keep_reduce_dtype: bool = False

    @property
    def offloads(self) -> bool:
        """Return whether shards are in pinned host memory and compute is on an accelerator."""
        return self.shard_device.type == "cpu" and self.device.type != "cpu"
