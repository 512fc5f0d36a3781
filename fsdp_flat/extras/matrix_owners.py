"""Assigns each parameter an owner in its shard group for a step, and plans the rounds and transfers of the step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import nn

from fsdp_flat.comm import P2PChannels, RankGroup
from fsdp_flat.core import PLAIN, FlatParameter, place_of, set_grad
from fsdp_flat.errors import OptionError, UnsupportedError, UsageError, counted
from fsdp_flat.layout import Interval, ReplicatedPartition, TransferPlan, plan_transfer
from fsdp_flat.state import IndexedParam, ParamIndex

_NO_MOVES = TransferPlan((), (), None)


class GradStatus(IntEnum):
    """Enumerates what a rank can hold of a parameter and its gradient, as exchanged before a step."""

    NO_GRAD = 0
    HAS_GRAD = 1
    NO_ELEMENTS = 2
    NOT_SHARDED = 3


class OwnedParam:
    """Holds one parameter of a unit, and plans its transfers to its owner and back.

    Attributes:
        owner: the rank of the shard group that updates it.
        whole: the inner optimizer's parameter of unsharded shape; it has memory only on the owner during a step.
        is_on_one_rank: the owner holds all elements, so that nothing is transferred.
    """

    def __init__(self, param: nn.Parameter, managed: IndexedParam, owner: int) -> None:
        self.param, self.managed, self.owner = param, managed, owner
        self.rank_group, pieces = managed.rank_group, managed.partition
        self.is_owner = self.rank_group.rank == owner
        self.numel = pieces.numel
        self.whole = nn.Parameter(self._without_memory(), requires_grad=param.requires_grad)
        # Keep attributes by which an optimizer distinguishes parameters.
        self.whole.__dict__.update({key: value for key, value in param.__dict__.items() if not key.startswith("_")})
        self.is_on_one_rank = pieces[owner].numel == self.numel
        self._to_owner, self._from_owner = _NO_MOVES, _NO_MOVES
        if not self.is_on_one_rank:
            full, rank = ReplicatedPartition(self.numel, owner, self.rank_group.size), self.rank_group.rank
            self._to_owner, self._from_owner = plan_transfer(pieces, full, rank), plan_transfer(full, pieces, rank)

    def _without_memory(self) -> torch.Tensor:
        """Return a tensor of the unsharded shape that has one element in memory."""
        return torch.empty((), dtype=self.param.dtype, device=self.param.device).expand(self.managed.shape)

    def status(self) -> GradStatus:
        """Return whether this rank holds elements of it, and a gradient of them."""
        piece = self.managed.local_shard
        if self.param.numel() != piece.numel:
            return GradStatus.NOT_SHARDED
        if piece.is_empty and self.numel > 0:
            return GradStatus.NO_ELEMENTS
        return GradStatus.NO_GRAD if self.param.grad is None else GradStatus.HAS_GRAD

    def gather(self, channels: P2PChannels, *, has_grad: bool) -> None:
        """Begin to send weight and gradient, if this rank has one, to the owner's unsharded parameter."""
        param, grad = self.param.detach().reshape(-1), self.param.grad
        sources = [param, param if grad is None else grad.detach().reshape(-1)]
        targets: Sequence[torch.Tensor | None] = (None, None)
        if has_grad and self.is_owner:
            targets = found = sources if self.is_on_one_rank else [each.new_empty(self.numel) for each in sources]
            self.whole.requires_grad_(self.param.requires_grad)
            self.whole.data = found[0].view(self.managed.shape)
            set_grad(self.whole, found[1].view(self.managed.shape))
        for source, target in zip(sources, targets, strict=True):
            self._transfer(channels, self._to_owner if has_grad else _NO_MOVES, source, target)

    def scatter(self, channels: P2PChannels, *, has_grad: bool) -> None:
        """Begin to send the weight from the owner back to the local shards."""
        target = self.param.detach().reshape(-1)
        source = self.whole.detach().reshape(-1) if has_grad and self.is_owner else None
        if source is not None and self.is_on_one_rank and place_of(source) != place_of(target):
            target.copy_(source)
        self._transfer(channels, self._from_owner if has_grad else _NO_MOVES, source, target)

    def _transfer(
        self, channels: P2PChannels, plan: TransferPlan, source: torch.Tensor | None, target: torch.Tensor | None
    ) -> None:
        # Rounds already limit the bytes in flight.
        channels.add(plan, source, target, rank_group=self.rank_group, device=self.managed.unit.options.device)

    def release(self, *, has_grad: bool) -> None:
        """Free the memory of the unsharded weight and gradient, after the transfers."""
        if has_grad:
            # The transfer bypasses the version counter, from which units detect that their weights have changed.
            torch.autograd.graph.increment_version(self.param)
        self.whole.grad = None
        self.whole.data = self._without_memory()

    def __str__(self) -> str:
        return str(self.managed)


def check_param(index: ParamIndex, param: torch.Tensor) -> None:
    """Raise if a parameter cannot be unsharded on one rank, or is not the model's."""
    if isinstance(param, FlatParameter):
        held = index.managed.get(param)
        where = "" if held is None else f" of unit {held[0].unit.name!r}, with {held[0].fqn!r} in it,"
        raise OptionError(
            f"MatrixOptimizer was given a flat parameter{where} of which this rank holds "
            f"{counted(param.numel(), 'elements')}; it needs the parameters themselves. Wrap the model with "
            "use_orig_params=True."
        )
    assert isinstance(param, nn.Parameter)
    index.fqns_of(param)
    for managed in index.managed.get(param, ()):
        if managed.adapter is not PLAIN:
            raise UnsupportedError(
                f"Parameter {managed} is split by tensor parallelism on rank {managed.rank_group.rank} of the shard "
                "group, and MatrixOptimizer makes parameters full over the shard group only. Leave it to an optimizer "
                "that works element by element, such as AdamW."
            )


def check_status(entry: OwnedParam, found: Sequence[int]) -> None:
    """Raise if a parameter is not sharded on a rank, or has a gradient on some of its ranks only."""
    with_grad = [rank for rank, status in enumerate(found) if status == GradStatus.HAS_GRAD]
    without = [rank for rank, status in enumerate(found) if status == GradStatus.NO_GRAD]
    if GradStatus.NOT_SHARDED in found:
        raise UsageError(
            f"Parameter {entry} is not sharded, or was given another shape, so MatrixOptimizer cannot step. Step "
            "outside of summon_full_params and unshard_for."
        )
    if with_grad and without:
        raise UsageError(
            f"Parameter {entry} has a gradient on ranks {with_grad} of the shard group and none on ranks {without}, so "
            "MatrixOptimizer cannot make it full. Set gradients to None on every rank or on none."
        )


def balanced_owners(
    params: Sequence[tuple[nn.Parameter, IndexedParam]], placed: Sequence[OwnedParam]
) -> dict[nn.Parameter, int]:
    """Choose an owner for each parameter, the same on every rank.

    The largest parameters come first. Of the ranks with elements of a parameter, the one that owns the fewest elements
    so far (those of ``placed`` count) is chosen; of equal ones, the one with the longest local shard.
    """
    loads: dict[RankGroup, list[int]] = {}
    for entry in placed:
        loads.setdefault(entry.rank_group, [0] * entry.rank_group.size)[entry.owner] += entry.numel
    found = {}
    for param, managed in sorted(params, key=lambda item: -item[1].partition.numel):
        load = loads.setdefault(managed.rank_group, [0] * managed.rank_group.size)
        pieces = managed.partition
        holders = [rank for rank in pieces.ranks(Interval(0, pieces.numel)) if not pieces[rank].is_empty] or [0]
        owner = min(holders, key=lambda rank: (load[rank], -pieces[rank].numel, rank))
        load[owner] += pieces.numel
        found[param] = owner
    return found


def rounds_of(entries: Sequence[OwnedParam], max_nbytes: int) -> list[list[OwnedParam]]:
    """Return the parameters of rounds, in which an owner receives at most ``max_nbytes``, or those of one parameter.

    The rounds of a group depend on its own parameters only: its ranks may be in different further groups, and so have
    different numbers of rounds.
    """
    rounds: list[list[OwnedParam]] = []
    # By group, the round in progress, and the bytes that its owners receive in it.
    current: dict[RankGroup, tuple[int, dict[int, int]]] = {}
    for entry in entries:
        index, received = current.setdefault(entry.rank_group, (0, {}))
        nbytes = 0 if entry.is_on_one_rank else 2 * entry.numel * entry.param.itemsize
        if received.get(entry.owner) and received[entry.owner] + nbytes > max_nbytes:
            index, received = current[entry.rank_group] = (index + 1, {})
        received[entry.owner] = received.get(entry.owner, 0) + nbytes
        if index == len(rounds):
            rounds.append([])
        rounds[index].append(entry)
    return rounds
