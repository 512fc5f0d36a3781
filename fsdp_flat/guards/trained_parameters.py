"""Compares which parameters ranks train, before they mix the gradients of different ones."""

from __future__ import annotations

from fsdp_flat.comm import RankGroup, agree, all_rank_groups
from fsdp_flat.core import TRAINED, Iteration, Step, Unit, WeightsVersion, trained_lines
from fsdp_flat.guards.once_a_tree import OnceATree


class TrainedParameters(OnceATree):
    """Refuses ranks of a shard group that train different parameters, or run different units, when they first train.

    Ranks compare where they communicate over the same process groups anyway: over shard groups at the first forward
    that trains, over replicas at the first backward that reduces gradients (:class:`TrainedReplicas`). Later steps
    compare a digest (:mod:`fsdp_flat.core.exchange`).
    """

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Raise a RankMismatchError if ranks of a shard group train different parameters."""
        if not iteration.trains or step in self.seen:
            return
        sharded = dict.fromkeys(
            param_group.comm.options.groups
            for unit in step.units
            for param_group in unit.param_groups
            if param_group.comm.state_collectives is not None
        )
        for groups in sharded:
            agree(trained_lines(step.units, [groups]), None, [groups.shard], TRAINED)
        self.seen.add(step)  # after an error the next forward compares again


class TrainedReplicas(OnceATree):
    """Refuses replicas that train different parameters, or run different units, before gradients are mixed."""

    def before_backward(self, unit: Unit, weights: WeightsVersion, current: WeightsVersion) -> None:
        """Raise a RankMismatchError if replicas train different parameters."""
        step = unit.step
        if step in self.seen or not any(each.control.sync_gradients for each in step.units):
            return
        self.seen.add(step)
        groups = dict.fromkeys(
            param_group.comm.options.groups for each in step.units for param_group in each.param_groups
        )
        replicated = [each for each in groups if each.replicate.size > 1]
        if replicated and any(each.is_trainable for each in step.units):
            # What ranks find over the groups of an inner unit is exchanged over those of the outermost one too.
            rank_groups = all_rank_groups([step.root.options.groups, *replicated])

            def lines_of(rank_group: RankGroup) -> list[str]:
                return trained_lines(step.units, [each for each in replicated if rank_group in each.rank_groups])

            agree(lines_of, None, rank_groups, TRAINED)
