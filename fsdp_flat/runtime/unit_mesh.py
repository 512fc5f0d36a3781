"""Holds what the handles of a unit on one mesh share: their groups, and the collectives of the shard group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any

import torch

from fsdp_flat.comm import (
    CollectiveChoice,
    Pending,
    RankGroup,
    ShardingGroups,
    collectives_for,
    subgroup_of,
    unit_names,
    unrecorded,
)
from fsdp_flat.errors import counted
from fsdp_flat.flat import ParamGroup, join_inputs
from fsdp_flat.runtime.options import UnitOptions
from fsdp_flat.runtime.reduction import CommContext

_BEGIN_GATHER = methodcaller("begin_gather")


class SmallerGroup:
    """Keeps all shards of a mesh within ``num_ranks`` consecutive ranks, of one host for example, for backward.

    After forward each rank keeps the shards of several ranks of the shard group, so that backward all-gathers over the
    smaller group alone. ``num_ranks`` divides the size of the shard group, each rank of which must create this.
    """

    def __init__(self, shard: RankGroup, num_ranks: int, device: torch.device, *, unit: int, name: str) -> None:
        self.rank_group = subgroup_of(shard, num_ranks)
        self.device, self._unit, self._name = device, unit, name
        num_kept = shard.size // num_ranks
        self._ranks = range(self.rank_group.rank * num_kept, (self.rank_group.rank + 1) * num_kept)
        self.use_collectives(CollectiveChoice())

    def use_collectives(self, choice: CollectiveChoice) -> None:
        """Use the collectives of ``choice`` in later steps."""
        collectives = collectives_for(self.rank_group, self.device, choice, unit=self._unit, name=self._name)
        assert collectives is not None
        self.collectives = collectives

    def keep(self, handles: Sequence[ParamGroup]) -> None:
        """Copy from the buffers of ``handles`` the shards that this rank keeps."""
        with unrecorded():
            for handle in handles:
                handle.keep_shards(self._ranks)


class UnitMesh:
    """Holds the handles of a unit that are sharded over one mesh, and their collectives.

    Attributes:
        options: the unit's options with the groups of this mesh.
        handles: one per flat parameter; none if the unit has no parameters on this mesh.
        unit_id: id of the unit and mesh in messages between ranks, equal on all ranks; 0 if it has none.
        name: the unit's name and ``suffix``.
        collectives: exact collectives of the shard group, for state dicts and ``summon_full_params``; None for a single
            rank.
        step_collectives: the collectives that steps use, by ``choice``.
        issued: the tree's list of collectives over these groups, which ranks compare.
        places_shards: an all-gather ends with copies from the shards of ranks to parameters.
        smaller_group: keeps all shards between forward and backward; None if backward uses the shard group.
    """

    def __init__(self, options: UnitOptions, handles: Sequence[ParamGroup], unit_id: int, name: str) -> None:
        self.options, self.handles, self.unit_id, self.name = options, list(handles), unit_id, name
        self.choice = CollectiveChoice()
        self.collectives = collectives_for(self.groups.shard, options.device, unit=unit_id, name=name)
        self.step_collectives = self.collectives
        self.smaller_group: SmallerGroup | None = None
        self.places_shards = options.rows is not None
        self.issued: list[tuple[str, Any]] = []

    @property
    def suffix(self) -> str:
        """Text after the unit's name, for a mesh that ``shard_placement_fn`` chose; else empty."""
        return "" if self.options.rows is None else self.options.rows.suffix

    @property
    def groups(self) -> ShardingGroups:
        """The groups over which the handles are sharded and replicated."""
        return self.options.groups

    def rename(self, unit_name: str) -> None:
        """Rename the mesh and its handles after the unit."""
        self.name, group = unit_name + self.suffix, self.groups.shard.group
        if group is not None:
            unit_names(group)[self.unit_id] = self.name
        for handle in self.handles:
            handle.rename(self.name)

    def use_context(self, context: CommContext) -> None:
        """Use ``context``: the memory and records of the tree that the unit belongs to."""
        self.issued = context.collectives.of(self.groups)
        for handle in self.handles:
            handle.use_pool(context.pool)

    def use_collectives(self, choice: CollectiveChoice) -> None:
        """Use the collectives of ``choice`` in later steps. The caller checks that no step is under way."""
        self.choice = choice
        shard, device = self.groups.shard, self.options.device
        self.step_collectives = collectives_for(shard, device, choice, unit=self.unit_id, name=self.name)
        if self.smaller_group is not None:
            self.smaller_group.use_collectives(choice)

    def use_device(self, device: torch.device) -> None:
        """Compute on another device from now on, to which the handles have moved."""
        self.options = replace(self.options, device=device)
        self.collectives = collectives_for(self.groups.shard, device, unit=self.unit_id, name=self.name)
        if self.smaller_group is not None:
            self.smaller_group.device = device
        self.use_collectives(self.choice)

    def summary(self) -> str:
        """Return the strategy, numbers of ranks, dtypes, and bytes of this rank's shard, in one line."""
        shard, replicate = self.groups.shard.size, self.groups.replicate.size
        ranks = f"{shard} x {replicate} ranks (shard x replicate)" if replicate > 1 else counted(shard, "ranks")
        kinds = {(handle.orig_dtype, handle.compute_dtype): None for handle in self.handles}
        dtypes = [f"{kind}" if kind is compute else f"{kind} computed in {compute}" for kind, compute in kinds]
        of_dtypes = f" of {' and '.join(dtypes)}".replace("torch.", "") if dtypes else ""
        num_params = sum(len(handle.layout.param_infos) for handle in self.handles)
        nbytes = sum(handle.layout.shard_numel * handle.orig_dtype.itemsize for handle in self.handles)
        name = self.options.strategy.member.name
        return f"{name} over {ranks}, {counted(num_params, 'parameters')}{of_dtypes}, {counted(nbytes, 'bytes')} a rank"

    def begin_all_gather(self, context: CommContext) -> list[Pending]:
        """Begin the all-gathers of the handles, over the smaller group if the handles keep shards for it.

        All DTensor handles of one compute dtype share an all-gather; each flat parameter has one of its own.
        """
        smaller, collectives, pendings = self.smaller_group, self.step_collectives, []
        if smaller is not None and self.handles and self.handles[0].kept_shards is not None:
            collectives = smaller.collectives
        inputs = list(map(_BEGIN_GATHER, self.handles))
        if collectives is None:
            return []
        for tensor, target in join_inputs(inputs) if len(inputs) > 1 else inputs:
            if context.trace is not None:
                context.trace.append(("all_gather", self.name))
            self.issued.append(("all-gather", self))
            pendings.append(collectives.begin_all_gather(tensor, target))
        return pendings
