"""Describes a parameter group: how it is sharded, on which devices and in which dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_flat.comm import RankGroup
from fsdp_flat.core.per_param_sharding import PerParamSharding


@dataclass(slots=True)
class ParamGroupSpec:
    """Describes a parameter group; the group and the objects that it owns share one, which a conversion changes.

    Attributes:
        module: registers the flat parameter: the unit's module, without wrappers for checkpoints and compilation.
        rank, world_size: this rank in the shard group, and its size.
        num_ranks: ranks over which gradients are averaged; the tail of an unsharded layout is padded to a multiple.
        device: device of the unsharded parameters.
        shard_device: device of the shard and its gradient; a CPU shard is pinned if ``device`` is no CPU.
        compute_dtype, master_dtype: dtypes of the unsharded parameters and of the shard; None keeps the original one.
        reduce_dtype: dtype in which gradients are reduced; None follows ``compute_dtype``.
        keep_reduce_dtype: sharded gradients stay in ``reduce_dtype``.
        per_param: how each parameter is sharded by itself and shown as a DTensor; None for a flat layout.
        rank_groups: the groups of ranks that hold shards or replicas of the parameters with this rank.
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
    per_param: PerParamSharding | None = None
    rank_groups: Sequence[RankGroup] = ()
