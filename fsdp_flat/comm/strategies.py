"""Defines sharding strategies as a table: the groups a unit is sharded and replicated over, and when to reshard.

A new strategy is a member of ``api.ShardingStrategy`` and a row of ``STRATEGIES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from fsdp_flat.api import ShardingStrategy, member_of


@dataclass(frozen=True, slots=True)
class Strategy:
    """Describes one row of the strategy table.

    Attributes:
        member: the public enum member.
        shards: parameters, gradients and optimizer state are sharded over the shard group.
        replicates: gradients are also all-reduced over a replicate group.
        reshard_after_forward: unsharded parameters are freed after forward (except the outermost unit's)
            and, under ``no_sync``, after backward.
    """

    member: ShardingStrategy
    shards: bool
    replicates: bool
    reshard_after_forward: bool

    @property
    def is_hybrid(self) -> bool:
        """Return whether the strategy needs two groups."""
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
    """Return the table row of a public enum member (or of torch's), or of ``FULL_SHARD`` for ``None``.

    Raises:
        OptionError: if ``value`` is not a sharding strategy; the text lists the choices.
    """
    given = ShardingStrategy.FULL_SHARD if value is None else value
    return STRATEGIES[member_of(ShardingStrategy, given, "sharding_strategy")]
