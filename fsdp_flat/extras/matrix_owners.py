"""Assigns each parameter an owner in its shard group for a step, and plans the rounds and transfers of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import nn

from fsdp_flat.comm import RankGroup
from fsdp_flat.errors import OptionError, UnsupportedError, UsageError
from fsdp_flat.flat import PLAIN, FlatParameter, set_grad
from fsdp_flat.layout import Interval, ReplicatedPartition, TransferPlan, plan_transfer
from fsdp_flat.state import IndexedParam, ParamIndex

NO_MOVES = TransferPlan((), (), None)


class GradStatus(IntEnum):
    """Enumerates what a rank can hold of a parameter and its gradient, as exchanged before a step."""

    NO_GRAD = 0
    HAS_GRAD = 1
    NO_ELEMENTS = 2
    NOT_SHARDED = 3


@dataclass(frozen=True, slots=True, eq=False)
class OwnedParam(IndexedParam):
    """Describes one parameter of a unit and its owner.

    Attributes:
        param: the model's parameter, this rank's local shard.
        owner: the rank of the shard group that updates it.
        whole: the inner optimizer's parameter of unsharded shape; it has memory only on the owner during a step.
        is_on_one_rank: whether the owner holds all elements, so that nothing is transferred.
        to_owner, from_owner: this rank's plans for the transfers from local shards to the owner, and back.
    """

    param: nn.Parameter
    owner: int
    whole: nn.Parameter
    is_on_one_rank: bool
    to_owner: TransferPlan
    from_owner: TransferPlan

    @classmethod
    def of(cls, param: nn.Parameter, managed: IndexedParam, owner: int) -> OwnedParam:
        """Make the inner optimizer's parameter, and plan the transfers."""
        whole = nn.Parameter(without_memory(param, managed.shape), requires_grad=param.requires_grad)
        # Keep attributes by which an optimizer distinguishes parameters.
        whole.__dict__.update({key: value for key, value in param.__dict__.items() if not key.startswith("_")})
        rank_group, pieces = managed.rank_group, managed.partition
        is_on_one_rank = pieces[owner].numel == pieces.numel
        plans = NO_MOVES, NO_MOVES
        if not is_on_one_rank:
            full = ReplicatedPartition(pieces.numel, owner, rank_group.size)
            plans = plan_transfer(pieces, full, rank_group.rank), plan_transfer(full, pieces, rank_group.rank)
        location = managed.unit, managed.handle, managed.index, managed.fqns
        return cls(*location, param, owner, whole, is_on_one_rank, *plans)

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded parameter."""
        return self.handle.layout.param_infos[self.index].numel

    @property
    def is_owner(self) -> bool:
        """Return whether this rank updates it."""
        return self.rank_group.rank == self.owner

    def status(self) -> GradStatus:
        """Return whether this rank holds elements of it, and a gradient of them."""
        piece = self.local_shard
        if self.param.numel() != piece.numel:
            return GradStatus.NOT_SHARDED
        if piece.is_empty and self.numel > 0:
            return GradStatus.NO_ELEMENTS
        return GradStatus.NO_GRAD if self.param.grad is None else GradStatus.HAS_GRAD

    def fill(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        """Set the weight and the gradient (1-D, ``numel``) that the inner optimizer uses."""
        self.whole.requires_grad_(self.param.requires_grad)
        self.whole.data = weight.view(self.shape)
        set_grad(self.whole, grad.view(self.shape))

    def release(self) -> None:
        """Free the memory of the unsharded weight and gradient."""
        self.whole.grad = None
        self.whole.data = without_memory(self.param, self.shape)


def without_memory(param: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of ``shape`` that has one element in memory."""
    return torch.empty((), dtype=param.dtype, device=param.device).expand(tuple(shape))


def check_param(index: ParamIndex, param: torch.Tensor) -> None:
    """Raise if a parameter cannot be unsharded on one rank.

    Raises:
        OptionError: it is a flat parameter, or does not belong to the model.
        UnsupportedError: it is sharded by tensor parallelism.
    """
    if isinstance(param, FlatParameter):
        held = index.managed.get(param)
        where = "" if held is None else f" of unit {held[0].unit.name!r}, with {held[0].fqn!r} in it,"
        raise OptionError(
            f"MatrixOptimizer was given a flat parameter{where} of which this rank holds {param.numel()} elements; it "
            "needs the parameters themselves. Wrap the model with use_orig_params=True."
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
    """Raise if a parameter is not sharded on a rank, or has a gradient on some of its ranks only.

    Raises:
        UsageError: one of these is the case; raised on every rank that compares.
    """
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
    so far is chosen; of equal ones, the one with the longest local shard.

    Args:
        params: parameters without owners.
        placed: parameters with owners, whose elements count too.
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


def rounds_of(entries: Sequence[OwnedParam], max_nbytes: int) -> Iterator[list[OwnedParam]]:
    """Yield the parameters of each round.

    In a round an owner receives at most ``max_nbytes`` of weights and gradients, or those of one parameter.
    """
    current: list[OwnedParam] = []
    received: dict[tuple[RankGroup, int], int] = {}
    for entry in entries:
        key = (entry.rank_group, entry.owner)
        nbytes = 0 if entry.is_on_one_rank else 2 * entry.numel * entry.param.itemsize
        if received.get(key) and received[key] + nbytes > max_nbytes:
            yield current
            current, received = [], {}
        current.append(entry)
        received[key] = received.get(key, 0) + nbytes
    if current:
        yield current
