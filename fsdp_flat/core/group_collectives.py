"""Runs the collectives of parameter groups: all-gathers before compute, and the choices that callers make for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from fsdp_flat.comm import CollectiveChoice, Pending, RankGroup, collectives_for, subgroup_of, unit_names
from fsdp_flat.core.gather_targets import join_inputs
from fsdp_flat.core.options import UnitOptions
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.errors import counted

_BEGIN_GATHER = methodcaller("begin_gather")


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
        exact: collectives of the shard group for state dicts and ``summon_full_params``; None for a single rank.
        of_steps: those that steps use, by ``choice``.
        post_forward: those of ``smaller_group``; None without one.
        issued: the tree's list of collectives over these process groups, which ranks compare.
    """

    def __init__(self, options: UnitOptions, unit_id: int, name: str) -> None:
        self.options, self.unit_id, self.name = options, unit_id, name
        self.issued: list[tuple[str, Any]] = []
        self.smaller_group: SmallerGroup | None = None
        self.use(options, CollectiveChoice())

    def use(self, options: UnitOptions, choice: CollectiveChoice) -> None:
        """Use other options (of another device), or another choice, in later steps. No step may be under way."""
        self.options, self.choice = options, choice
        shard, smaller = options.groups.shard, self.smaller_group
        collectives = partial(collectives_for, device=options.device, unit=self.unit_id, name=self.name)
        self.exact = collectives(shard)
        self.of_steps = collectives(shard, choice=choice)
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


def begin_all_gathers(handles: Sequence[ParamGroup], trace: list[tuple[str, str]] | None) -> list[Pending]:
    """Begin the all-gathers of parameter groups of one mesh.

    All groups of DTensors with one compute dtype share an all-gather; each flat parameter has one of its own.
    """
    comm = handles[0].comm
    collectives = comm.of_steps if handles[0].kept_shards is None else comm.post_forward
    inputs = list(map(_BEGIN_GATHER, handles))
    if collectives is None:
        return []
    pendings = []
    for tensor, target in join_inputs(inputs) if len(inputs) > 1 else inputs:
        if trace is not None:
            trace.append(("all_gather", comm.name))
        comm.issued.append(("all-gather", comm))
        pendings.append(collectives.begin_all_gather(tensor, target))
    return pendings


def summary(options: UnitOptions, handles: Sequence[ParamGroup]) -> str:
    """Return strategy, numbers of ranks, dtypes, and bytes of this rank's shards of groups on one mesh, in one line."""
    shard, replicate = options.groups.shard.size, options.groups.replicate.size
    ranks = f"{shard} x {replicate} ranks (shard x replicate)" if replicate > 1 else counted(shard, "ranks")
    kinds = {(handle.orig_dtype, handle.compute_dtype): None for handle in handles}
    dtypes = [f"{kind}" if kind is compute else f"{kind} computed in {compute}" for kind, compute in kinds]
    of_dtypes = f" of {' and '.join(dtypes)}".replace("torch.", "") if dtypes else ""
    num_params = sum(len(handle.layout.param_infos) for handle in handles)
    nbytes = sum(handle.layout.shard_numel * handle.orig_dtype.itemsize for handle in handles)
    name = options.strategy.member.name
    return f"{name} over {ranks}, {counted(num_params, 'parameters')}{of_dtypes}, {counted(nbytes, 'bytes')} a rank"


def on_device(options: UnitOptions, device: torch.device) -> UnitOptions:
    """Return options for compute on another device."""
    return replace(options, device=device)
