"""Defines the switches of one unit, which its strategy fills and a caller may change between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_flat.comm import CollectiveChoice, RankGroup, Strategy, collectives_for, subgroup_of, unrecorded
from fsdp_flat.flat import FlatParamHandle


class SmallerGroup:
    """Holds the parameters of a unit sharded over some consecutive ranks of its shard group, from forward to backward.

    After forward each rank keeps the shards of several ranks of the shard group, so that the smaller group has all of
    them, and backward all-gathers over that group alone: the ranks of one host, for example.
    Every rank of the shard group must create it. ``num_ranks`` is a factor of the shard group's.
    """

    def __init__(self, shard: RankGroup, num_ranks: int, device: torch.device, *, unit: int, name: str) -> None:
        self.rank_group = subgroup_of(shard, num_ranks)
        self._device, self._unit, self._name = device, unit, name
        num_rows = shard.size // num_ranks
        self._ranks = range(self.rank_group.rank * num_rows, (self.rank_group.rank + 1) * num_rows)
        self.use_collectives(CollectiveChoice())

    def use_collectives(self, choice: CollectiveChoice) -> None:
        """Use other collectives in later steps, as the unit does."""
        collectives = collectives_for(self.rank_group, self._device, choice, unit=self._unit, name=self._name)
        assert collectives is not None
        self.collectives = collectives

    def keep(self, handles: Sequence[FlatParamHandle]) -> None:
        """Keep this rank's part of the unsharded parameters."""
        with unrecorded():
            for handle in handles:
                handle.keep_rows(self._ranks)


@dataclass(slots=True)
class UnitControl:
    """Holds the switches of one unit. The step reads them; nothing else decides what they decide.

    Attributes:
        reshard_after_forward: free the unsharded parameters after forward; None: unless the unit is the outermost.
        smaller_group: holds all parameters between forward and backward, if they are freed; None: the shard group does.
        reshard_after_backward: free them after backward; None: where gradients are reduced or
            ``reshard_after_forward`` is not False.
        sync_gradients: reduce gradients at the end of the unit's backward; False accumulates unreduced ones.
        unshard_in_backward: unshard the parameters for backward; False where backward does not read them.
        is_last_backward: at a root: the end of a backward waits for reductions and sets gradients.
        finalizes_by_hand: at a root: no backward does so; ``finalize_backward`` does.
        keeps_unsharded_storage: a reshard leaves the memory of the unsharded parameters, so that it stays in place.
        keeps_last: as the last unit of a forward, keep the buffers for the backward that follows.
        forward_prefetch: modules whose units' all-gathers begin once this unit is unsharded in forward; empty: the next
            one of the last forward.
        backward_prefetch: the same in backward; empty: the next one, by the unit's option.
    """

    reshard_after_forward: bool | None = None
    smaller_group: SmallerGroup | None = None
    reshard_after_backward: bool | None = None
    sync_gradients: bool = True
    unshard_in_backward: bool = True
    is_last_backward: bool = True
    finalizes_by_hand: bool = False
    keeps_unsharded_storage: bool = False
    keeps_last: bool = True
    forward_prefetch: tuple[nn.Module, ...] = ()
    backward_prefetch: tuple[nn.Module, ...] = ()

    @classmethod
    def of(cls, strategy: Strategy) -> UnitControl:
        """Return the switches of a new unit of the wrapper, from the columns of its strategy."""
        return cls(reshard_after_forward=None if strategy.reshard_after_forward else False)
