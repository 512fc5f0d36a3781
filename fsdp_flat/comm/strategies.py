"""Sharding strategies as data: over which group a unit is sharded, replicated, and when it is freed."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from fsdp_flat.api import ShardingStrategy
from fsdp_flat.errors import OptionError

__all__ = ["STRATEGIES", "Strategy", "strategy_from"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of the strategy table.

    Attributes:
        member: the public enum member.
        shards: parameters, gradients and optimizer state are split over the shard group.
        replicates: there is a replicate group over which gradients are reduced as well.
        reshard_after_forward: gathered parameters are freed after forward (the outermost unit stays)
            and, under ``no_sync``, after backward.
    """

    member: ShardingStrategy
    shards: bool
    replicates: bool
    reshard_after_forward: bool

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy needs two groups."""
        return self.shards and self.replicates


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
    """The table row for a public enum member, or for ``None`` (``FULL_SHARD``).

    A member of another library's enum of the same class name (torch's own, say) is taken by its name.

    Raises:
        OptionError: ``value`` is no sharding strategy; the text lists the choices.
    """
    if value is None:
        return STRATEGIES[ShardingStrategy.FULL_SHARD]
    if isinstance(value, ShardingStrategy):
        return STRATEGIES[value]
    name = str(getattr(value, "name", None))
    if type(value).__name__ == "ShardingStrategy" and name in ShardingStrategy.__members__:
        return STRATEGIES[ShardingStrategy[name]]
    choices = ", ".join(f"ShardingStrategy.{member.name}" for member in ShardingStrategy)
    raise OptionError(f"sharding_strategy must be one of {choices}; got {value!r} of type {type(value).__name__}.")
