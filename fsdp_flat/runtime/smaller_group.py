"""Holds the parameters of a unit sharded over fewer ranks between its forward and its backward.

After forward each rank keeps the shards of several ranks of the shard group, so that a smaller group of ranks has all
of them, and backward all-gathers over that group alone: the ranks of one host, for example.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_flat.comm import CollectiveChoice, RankGroup, collectives_for, subgroup_of, unrecorded
from fsdp_flat.flat import FlatParamHandle


class SmallerGroup:
    """Holds the parameters of a unit sharded over some consecutive ranks of its shard group.

    Every rank of the shard group must create it.

    Args:
        shard: the shard group.
        num_ranks: number of ranks of the smaller group, a factor of the shard group's.
        device: the compute device.
        unit: id of the unit, equal on every rank.
        name: name of the unit in errors.

    Attributes:
        collectives: those of the smaller group.
    """

    def __init__(self, shard: RankGroup, num_ranks: int, device: torch.device, *, unit: int, name: str) -> None:
        self._rank_group = subgroup_of(shard, num_ranks)
        self._device = device
        self._unit = unit
        self._name = name
        num_rows = shard.size // num_ranks
        self._ranks = range(self._rank_group.rank * num_rows, (self._rank_group.rank + 1) * num_rows)
        self.use_collectives(CollectiveChoice())

    def use_collectives(self, choice: CollectiveChoice) -> None:
        """Use other collectives in later steps, as the unit does."""
        group, unit, name = self._rank_group, self._unit, self._name
        collectives = collectives_for(group, self._device, choice, unit=unit, name=name)
        assert collectives is not None
        self.collectives = collectives

    def keep(self, handles: Sequence[FlatParamHandle]) -> None:
        """Keep this rank's part of the unsharded parameters."""
        with unrecorded():
            for handle in handles:
                handle.keep_rows(self._ranks)
