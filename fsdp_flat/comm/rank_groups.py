"""Defines groups of ranks, the table of sharding strategies, and the groups of a unit by strategy.

A new strategy is a member of ``api.ShardingStrategy`` and a row of ``STRATEGIES``. A new column is read where its
choice is made: ``resolve_groups`` here, or ``UnitControl.of`` (core) for the switches of a unit.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from fsdp_flat.api import ShardingStrategy, member_of
from fsdp_flat.comm import torch_comm
from fsdp_flat.comm.torch_comm import backend_of, timeout_of
from fsdp_flat.errors import OptionError, OptionTypeError, UsageError, counted
from fsdp_flat.sizes import nbytes_of

_CPU = torch.device("cpu")
# Of messages that are never received; a caller's tags are small.
_TAG = 0x7F5D_F1A7
# Groups that the library has created, by default group; by ranks, purpose and timeout. torch holds each group that it
# creates, and each costs connections, so all models share them.
_shared: WeakKeyDictionary[dist.ProcessGroup, dict[object, dist.ProcessGroup]] = WeakKeyDictionary()
# The host group of each group that has one, and the other way round.
_hosts: WeakKeyDictionary[dist.ProcessGroup, ref[dist.ProcessGroup]] = WeakKeyDictionary()
_parents: WeakKeyDictionary[dist.ProcessGroup, ref[dist.ProcessGroup]] = WeakKeyDictionary()
# By default group and global ranks, the number of groups created of just these.
_num_created: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
# Groups of threads: destroy_process_group() makes torch forget a group, and gloo serves it as long as it is referenced.
_outliving: WeakSet[dist.ProcessGroup] = WeakSet()


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Describes a process group and this rank in it; ``group`` is None for a single rank that needs no group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RankGroup:
        if is_simulated(group):
            return cls(group, group.rank(), group.size())
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group, of a rank that is not alone."""
        assert self.group is not None
        return self.group

    @property
    def others(self) -> list[int]:
        return [*range(self.rank), *range(self.rank + 1, self.size)]


ALONE = RankGroup(None, 0, 1)


def is_simulated(group: object) -> bool:
    """Return whether a caller's object stands for a group, with ``rank()`` and ``size()`` alone: nothing communicates.

    Tests of wrapping pass one where no process group is initialised.
    """
    if isinstance(group, dist.ProcessGroup):
        return False
    return all(callable(getattr(group, name, None)) for name in ("rank", "size"))


def is_fake(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` is simulated or has torch's "fake" backend, so that ranks cannot compare values.

    A UsageError says that the group was destroyed.
    """
    if is_simulated(group):
        return True
    try:
        return dist.get_backend(group) == "fake"
    except ValueError as error:
        if group in _outliving:
            return False
        raise destroyed_error(group) from error


def connected(rank_groups: Iterable[RankGroup]) -> list[RankGroup]:
    """Return the groups that have other ranks and a backend that communicates."""
    return [each for each in rank_groups if each.group is not None and each.size > 1 and not is_fake(each.group)]


def destroyed_error(group: dist.ProcessGroup) -> UsageError:
    """Create the error for a model whose process group was destroyed."""
    return UsageError(
        f"A process group of {counted(group.size(), 'ranks')}, in which this is rank {group.rank()}, was destroyed "
        "(torch.distributed.destroy_process_group), and a FullyShardedDataParallel that was made with it is still in "
        "use. Destroy groups after the last step, state_dict and checkpoint; for a new group, load the model's state "
        "into one that is wrapped with it."
    )


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of the members of ``group``; a UsageError says that it was destroyed."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:
        raise destroyed_error(group) from error


def moves_by_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether gloo is the backend of ``group`` for tensors of ``device``."""
    backend = None if is_fake(group) else backend_of(group, device)
    return backend is not None and backend.name() == "gloo"


def moves_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether collectives of ``group`` take CPU tensors, unlike those of NCCL."""
    return is_fake(group) or backend_of(group, _CPU) is not None


def has_accelerator_backend(group: dist.ProcessGroup, accelerator: torch.device) -> bool:
    """Return whether ``group`` has a backend that was made for the accelerator, unlike gloo, such as NCCL."""
    backend = None if is_fake(group) else backend_of(group, accelerator)
    return backend is not None and backend.name() != "gloo"


def _new_group(
    parent: dist.ProcessGroup, ranks: Sequence[int], purpose: str, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group of global ``ranks``, which are in ``parent``, with its timeout. All of them must call this."""
    assert dist.group.WORLD is not None
    created = _num_created.setdefault(dist.group.WORLD, Counter())
    created[tuple(ranks)] += 1
    # Ranks create groups of the same ranks equally often, so they agree on the name.
    name = f"fsdp_flat_{hashlib.sha1(repr(list(ranks)).encode()).hexdigest()}_{created[tuple(ranks)]}"
    timeout, description = timeout_of(parent), f"fsdp_flat_{purpose}"
    return torch_comm.new_group(ranks, name, backend=backend, timeout=timeout, description=description)


def _shared_group(
    parent: dist.ProcessGroup, ranks: Sequence[int], purpose: str, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return the group for a purpose, as :func:`_new_group`, which creates it at the first call."""
    assert dist.group.WORLD is not None
    known, key = _shared.setdefault(dist.group.WORLD, {}), (tuple(ranks), purpose, timeout_of(parent))
    with suppress(KeyError, ValueError):  # not created yet, or destroyed by a caller
        dist.get_backend(known[key])
        return known[key]
    known[key] = _new_group(parent, ranks, purpose, backend=backend)
    return known[key]


def host_group(rank_group: RankGroup) -> RankGroup:
    """Return a group of the same ranks that moves CPU tensors: ``rank_group`` itself if it does, else a gloo group.

    Every rank of the group must call this.
    """
    group = rank_group.process_group
    if backend_of(group, _CPU) is not None:
        return rank_group
    # One for each group: calls of both are in one order.
    host = _shared_group(group, global_ranks(group), f"host of {group.group_name}", backend="gloo")
    _hosts[group], _parents[host] = ref(host), ref(group)
    return replace(rank_group, group=host)


def known_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of the same ranks that moves CPU tensors if there is one yet, else ``group``."""
    known = _hosts.get(group)
    return (None if known is None else known()) or group


def parent_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group that ``group`` is the host group of, else ``group`` itself."""
    known = _parents.get(group)
    return (None if known is None else known()) or group


def ended_ranks(rank_group: RankGroup) -> list[int]:
    """Return the other ranks that gloo has lost the connection to: their processes have ended.

    gloo says so when this rank begins to send. It asks nothing of the other rank, and no rank receives what is sent.
    """
    group, found = rank_group.group, []
    group = group and known_host_group(group)
    if group is not None and moves_by_gloo(group, _CPU):
        with torch_comm.unseen_by_modes():
            nothing = [torch.zeros(1, dtype=torch.uint8)]
            for rank in rank_group.others:
                try:
                    group.send(nothing, rank, _TAG)
                except RuntimeError:
                    found.append(rank)
    return found


def outliving_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group for a thread, whose collectives work until it ends, also if groups are destroyed meanwhile.

    It has the ranks of ``group``, all of which must call this. It is created at the first call.
    """
    outliving = _shared_group(group, global_ranks(group), "thread", backend="gloo")
    _outliving.add(outliving)
    return outliving


def second_group(rank_group: RankGroup) -> RankGroup:
    """Create another process group of the same ranks, whose collectives run beside those of the first.

    Every rank of the group must call this.
    """
    group = rank_group.process_group
    return RankGroup.of(_new_group(group, global_ranks(group), "second"))


def subgroup_of(rank_group: RankGroup, num_ranks: int) -> RankGroup:
    """Return the group of ``num_ranks`` consecutive ranks of ``rank_group`` that this rank is in.

    Every rank of ``rank_group`` must call this. The group is created at the first call.
    """
    group, first = rank_group.process_group, rank_group.rank // num_ranks * num_ranks
    return RankGroup.of(_shared_group(group, global_ranks(group)[first : first + num_ranks], "part"))


def new_groups_of(rank_group: RankGroup, ranks: Sequence[int], num_groups: int) -> list[RankGroup]:
    """Create groups of some ``ranks`` of ``rank_group``, whose collectives run beside each other's.

    All of these ranks must call this.
    """
    group = rank_group.process_group
    everyone = global_ranks(group)
    members = [everyone[rank] for rank in ranks]
    return [RankGroup.of(_new_group(group, members, "rail")) for _ in range(num_groups)]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Describes one row of the strategy table.

    Attributes:
        shards: parameters, gradients and optimizer state are sharded over the shard group.
        replicates: gradients are also all-reduced over a replicate group.
        reshard_after_forward: unsharded parameters are freed after forward (except the outermost unit's).
        budget: text of the bytes of unsharded parameters that the tree keeps from forward to backward nevertheless.
    """

    member: ShardingStrategy
    shards: bool
    replicates: bool
    reshard_after_forward: bool
    budget: str | None = None

    @property
    def is_hybrid(self) -> bool:
        return self.shards and self.replicates

    @property
    def name(self) -> str:
        """Name of the member, with the budget if there is one, as "FULL_SHARD:40GB"."""
        return self.member.name if self.budget is None else f"{self.member.name}:{self.budget}"

    @property
    def budget_nbytes(self) -> int | None:
        """The budget in bytes; None without one."""
        return None if self.budget is None else nbytes_of(self.budget)

    def with_budget(self, budget: str, argument: str) -> Strategy:
        """Return this strategy with a budget, a size like "40GB"; an OptionError says what is wrong in ``argument``."""
        if not (self.shards and self.reshard_after_forward):
            raise OptionError(
                f"{self.member.name} frees no parameters between forward and backward, so it takes no budget; got "
                f"{budget!r}. Give a budget to FULL_SHARD or HYBRID_SHARD."
            )
        nbytes_of(budget, f"The memory budget in {argument}")
        return replace(self, budget=budget.strip())


STRATEGIES = MappingProxyType(
    {
        row.member: row
        for row in (
            Strategy(ShardingStrategy.FULL_SHARD, shards=True, replicates=False, reshard_after_forward=True),
            Strategy(ShardingStrategy.SHARD_GRAD_OP, shards=True, replicates=False, reshard_after_forward=False),
            Strategy(ShardingStrategy.NO_SHARD, shards=False, replicates=True, reshard_after_forward=False),
            Strategy(ShardingStrategy.HYBRID_SHARD, shards=True, replicates=True, reshard_after_forward=True),
            Strategy(ShardingStrategy._HYBRID_SHARD_ZERO2, shards=True, replicates=True, reshard_after_forward=False),
        )
    }
)


def strategy_from(value: object) -> Strategy:
    """Return the strategy of a public enum member, or of torch's, or of its name, as "FULL_SHARD:40GB" with a budget.

    Names may be in any case. ``None`` stands for ``FULL_SHARD``.

    Raises:
        OptionError: if ``value`` is not a sharding strategy; the text lists the choices.
    """
    given = ShardingStrategy.FULL_SHARD if value is None else value
    name, separator, budget = value.partition(":") if isinstance(value, str) else ("", "", "")
    member = ShardingStrategy.__members__.get(name.strip().upper())
    if member is None:
        texts = ', or the name of one, also with a memory budget, as "FULL_SHARD:40GB"'
        return STRATEGIES[member_of(ShardingStrategy, given, "sharding_strategy", others=texts)]
    return STRATEGIES[member].with_budget(budget, "sharding_strategy") if separator else STRATEGIES[member]


@dataclass(frozen=True, slots=True)
class ShardingGroups:
    """Holds the shard group and the replicate group of one unit, each of size 1 if unused, and the caller's mesh."""

    shard: RankGroup
    replicate: RankGroup
    mesh: Any = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.shard.size * self.replicate.size

    @property
    def rank_groups(self) -> tuple[RankGroup, RankGroup]:
        return (self.shard, self.replicate)

    @property
    def as_one(self) -> list[RankGroup]:
        """The default group if it has just the ranks of both groups, else those of the two that have other ranks."""
        groups = connected(self.rank_groups)
        if len(groups) == 2 and dist.group.WORLD is not None and dist.get_world_size() == self.num_ranks:
            return [RankGroup.of(dist.group.WORLD)]
        return groups

    @property
    def primary(self) -> RankGroup:
        """Group of FSDP1's ``process_group``: the shard group, or the replicate group if nothing is sharded."""
        return self.shard if self.shard.group is not None else self.replicate

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self.primary.group


def all_rank_groups(groups: Iterable[ShardingGroups]) -> list[RankGroup]:
    """Return every process group of the given ones, each once."""
    return list(dict.fromkeys(rank_group for each in groups for rank_group in each.rank_groups))


def resolve_groups(
    strategy: Strategy, process_group: Any, device_mesh: Any, *, has_policy: bool, device: torch.device
) -> ShardingGroups:
    """Resolve the constructor's ``process_group`` and ``device_mesh`` into the two groups.

    With an auto-wrap policy one call creates all units. It may then create the groups of a hybrid strategy, within
    nodes and across them, if it got none: every rank of the default group must call this.

    Raises:
        OptionError: if the two do not fit each other or the strategy.
        OptionTypeError: if one of the two has another type.
        UsageError: if there is no default process group.
    """
    given = process_group if isinstance(process_group, tuple) else (process_group,)
    is_alone = all(map(is_simulated, given)) and device_mesh is None
    if not is_alone and not dist.is_initialized():
        raise UsageError(
            "FullyShardedDataParallel needs a process group: call torch.distributed.init_process_group(...) first, "
            "and start the script with torchrun."
        )
    if process_group is not None and device_mesh is not None:
        raise OptionError("process_group and device_mesh were both given; pass one of them.")
    name = strategy.member.name
    if device_mesh is not None:
        return _from_mesh(strategy, device_mesh)
    if strategy.is_hybrid and process_group is None:
        if not has_policy:
            raise OptionError(
                f"ShardingStrategy.{name} without an auto_wrap_policy needs its groups: pass a 2-D device_mesh (dim 0 "
                "replicates, dim 1 shards) or process_group=(shard_group, replicate_group), the same for every unit."
            )
        return _node_groups(device)
    if strategy.is_hybrid:
        is_pair = isinstance(process_group, tuple) and len(process_group) == 2
        if not is_pair or not all(map(_is_group, process_group)):
            raise OptionError(
                f"ShardingStrategy.{name} takes process_group=None or a tuple (shard_group, replicate_group) of two "
                f"process groups; got {process_group!r}."
            )
        return ShardingGroups(*map(RankGroup.of, process_group))
    process_group = dist.group.WORLD if process_group is None else process_group
    if not _is_group(process_group):
        raise OptionTypeError(
            f"process_group must be a torch.distributed.ProcessGroup for ShardingStrategy.{name}; got "
            f"{type(process_group).__name__}. A tuple of two groups belongs to the hybrid strategies."
        )
    return _single_group(strategy, process_group)


def _is_group(value: object) -> bool:
    return isinstance(value, dist.ProcessGroup) or is_simulated(value)


def _single_group(strategy: Strategy, group: dist.ProcessGroup, mesh: Any = None) -> ShardingGroups:
    pair = (RankGroup.of(group), ALONE) if strategy.shards else (ALONE, RankGroup.of(group))
    return ShardingGroups(*pair, mesh)


def _from_mesh(strategy: Strategy, mesh: Any) -> ShardingGroups:
    ndim = getattr(mesh, "ndim", None)
    if ndim is None or not callable(getattr(mesh, "get_group", None)):
        raise OptionTypeError(f"device_mesh must be a DeviceMesh; got {type(mesh).__name__}.")
    if strategy.is_hybrid:
        if ndim != 2:
            raise OptionError(
                f"ShardingStrategy.{strategy.member.name} needs a 2-D device_mesh (dim 0 replicates, dim 1 shards); "
                f"got a {ndim}-D mesh. init_device_mesh(device_type, (num_replicas, num_shards)) makes one."
            )
        return ShardingGroups(RankGroup.of(mesh.get_group(1)), RankGroup.of(mesh.get_group(0)), mesh)
    # FSDP1 uses dim 0 of a larger mesh here; a script may rely on it.
    return _single_group(strategy, mesh.get_group(0), mesh)


def _node_groups(device: torch.device) -> ShardingGroups:
    """Create groups that shard within a node (as launched, or by device count) and replicate across nodes."""
    world = dist.get_world_size()
    launcher = os.environ.get("LOCAL_WORLD_SIZE", "")
    if launcher.isdigit() and 0 < int(launcher) <= world:
        local = int(launcher)
    else:
        local = world if device.type == "cpu" else min(torch.accelerator.device_count(), world)
    if world % local != 0:
        raise OptionError(
            f"A hybrid strategy without groups shards within a node, but nodes of {local} do not divide "
            f"{counted(world, 'ranks')}. Pass a 2-D device_mesh or process_group=(shard_group, replicate_group)."
        )
    nodes = [list(range(start, start + local)) for start in range(0, world, local)]
    shard, _ = dist.new_subgroups_by_enumeration(nodes)
    replicate, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*nodes, strict=True)])
    return ShardingGroups(RankGroup.of(shard), RankGroup.of(replicate))
