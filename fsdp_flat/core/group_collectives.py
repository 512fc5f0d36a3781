"""Holds the collectives of a parameter group, by the choices that callers make for them."""

from __future__ import annotations

from functools import partial
from typing import Any

from fsdp_flat.comm import CollectiveOverrides, RankGroup, collectives_for, subgroup_of, unit_names
from fsdp_flat.core.options import UnitOptions


class SmallerGroup:
    """Keeps the shards of a group within ``num_ranks`` consecutive ranks, of one host for example, for backward.

    After forward each rank keeps the shards of several ranks of the shard group, so that backward all-gathers over the
    smaller group alone. ``num_ranks`` divides the size of the shard group, each rank of which must create this.
    """

    def __init__(self, shard: RankGroup, num_ranks: int) -> None:
        self.rank_group = subgroup_of(shard, num_ranks)
        num_kept = shard.size // num_ranks
        self.ranks = range(self.rank_group.rank * num_kept, (self.rank_group.rank + 1) * num_kept)


class GroupCollectives:
    """Holds the collectives of one parameter group.

    Attributes:
        options: the unit's options with the process groups of the group's mesh.
        unit_id: id of the unit and mesh in messages between ranks, equal on all ranks; 0 if it has none.
        name: the unit's name and the mesh's suffix.
        state_collectives: those of the shard group for state dicts and ``summon_full_params``; None for one rank.
        step_collectives: those that steps use, by ``choice``.
        post_forward: those of ``smaller_group``; None without one.
        gather_buffers, reduce_buffers: what allocates the unit's buffers, by ``choice``; None for memory of any kind.
        issued: the tree's list of collectives over these process groups, which ranks compare.
    """

    def __init__(self, options: UnitOptions, unit_id: int, name: str) -> None:
        self.options, self.unit_id, self.name = options, unit_id, name
        self.issued: list[tuple[str, Any]] = []
        self.smaller_group: SmallerGroup | None = None
        self.use(options, CollectiveOverrides())

    def use(self, options: UnitOptions, choice: CollectiveOverrides) -> None:
        """Use other options (of another device), or another choice, in later steps. No step may be under way."""
        self.options, self.choice = options, choice
        self.gather_buffers, self.reduce_buffers = choice.gather_buffers, choice.reduce_buffers
        shard, smaller = options.groups.shard, self.smaller_group
        collectives = partial(collectives_for, device=options.device, unit=self.unit_id, name=self.name)
        self.state_collectives = collectives(shard)
        self.step_collectives = collectives(shard, choice=choice)
        self.post_forward = None if smaller is None else collectives(smaller.rank_group, choice=choice)

    def use_smaller_group(self, smaller_group: SmallerGroup | None) -> None:
        """Keep shards for an all-gather over fewer ranks in backward, or (None) use the shard group there too."""
        self.smaller_group = smaller_group
        self.use(self.options, self.choice)

    def rename(self, unit_name: str) -> None:
        """Rename the group after its unit."""
        self.name, group = unit_name + self.options.mesh_suffix, self.options.groups.shard.group
        if group is not None:
            unit_names(group)[self.unit_id] = self.name
