"""Finds, and tells, how ranks differ in a backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from fsdp_flat.comm import CollectiveLog, ErrorTexts, ShardingGroups, agree
from fsdp_flat.core.events import LOGGER
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.unit import Unit
from fsdp_flat.errors import RankMismatchError, some_of

TRAINED = ErrorTexts(
    "comparing which parameters are trained",
    "Ranks run different units, or train different parameters of one.",
    "Every rank must run the same units in the same order, and freeze the same parameters.",
)
_ORDER = ErrorTexts(
    "comparing their collectives",
    "Ranks ran units in different orders, so weights or gradients of different units were mixed.",
    "Check that every rank builds the same model and takes the same branches, and that an exception on one rank alone "
    "was not caught.",
)
_AVERAGED = ErrorTexts(
    "averaging gradients that no unit manages",
    "Ranks average different parameters outside of units.",
    "Call average_ignored_gradients() on every rank, ignore the same modules, and add the same ones.",
)

_CALLS = ErrorTexts(
    "comparing by which norms they clipped gradients, and what they have loaded",
    "Ranks have clipped gradients by different norms before this backward, or only some have loaded a full state dict, "
    "so their weights do not fit together.",
    "Pass the same max_norm and norm_type on every rank, call load_state_dict on every rank with the full state dict, "
    "and go on from a checkpoint from before that.",
)

# What has become of the gradients of ranks that differ, by whether it was found after they were set.
_EFFECT = {
    False: "This backward's gradients are dropped, and weights are as they were before this step.",
    True: "It was found after the backward had set its gradients: if an optimizer has stepped since, weights are wrong "
    "from that step on. Nothing was saved meanwhile; go on from the last checkpoint.",
}


def trained_lines(units: Iterable[Unit], over: Sequence[ShardingGroups]) -> list[str]:
    """Describe the parameters on some process groups, and whether they are trained, one a line, alike on all ranks."""
    # Names may differ between ranks that ignore different modules; wrapping has compared them.
    return [
        f"{param_group.comm.unit_id or param_group.comm.name} {number} {param_info.shape} {trains}\t"
        f"parameter {param_info.fqn!r} of unit {param_group.comm.name!r} with requires_grad={trains}"
        for groups in over
        for unit in units
        for options, param_groups in unit.by_mesh()
        if options.groups == groups
        for number, param_group in enumerate(param_groups)
        for param_info, trains in zip(param_group.layout.param_infos, param_group.slots.requires_grad(), strict=True)
    ]


def raise_difference(
    issued: CollectiveLog,
    averaged: Sequence[str],
    calls: Sequence[str],
    units: Sequence[Unit],
    groups: ShardingGroups,
    *,
    is_late: bool,
) -> NoReturn:
    """Raise a RankMismatchError that shows how ranks differ. Every rank of the groups must call this.

    ``issued`` are the collectives of this rank, ``averaged`` has one line for each parameter outside of
    units whose gradient this rank is to average, and ``calls`` are those that have clipped gradients and loaded
    units. It ``is_late`` if gradients are set already.
    """
    lines_of_rank = partial(issued.lines, groups)
    for lines, texts in (
        (lines_of_rank, _ORDER),
        (trained_lines(units, [groups]), TRAINED),
        (averaged, _AVERAGED),
        (calls, _CALLS),
    ):
        texts = replace(texts, advice=f"{texts.advice} {_EFFECT[is_late]}")
        agree(lines, None, groups.rank_groups, texts)
    raise AssertionError("digests of a backward differ between ranks, and nothing that they cover does")


def late_gradients(param_groups: Iterable[ParamGroup]) -> RankMismatchError:
    """Return the error for gradients that some ranks alone had to reduce when others had set theirs already."""
    names = some_of(sorted(f"{param_group.spec.unit_name!r}" for param_group in param_groups), 4)
    return RankMismatchError(
        f"At the end of the last backward some ranks alone had gradients of these units that were not reduced yet: "
        f"{names}. They came after the unit's own backward, from weights used outside of its forward, or from no_sync "
        f"on those ranks alone, and the other ranks had set their gradients already. Do the same on every rank. "
        f"{_EFFECT[True]}"
    )


def log_unread_difference(
    root: Unit, issued: CollectiveLog, groups: ShardingGroups | None, unreduced: Iterable[ParamGroup]
) -> None:
    """Log at the end of the process that ranks differed in the last backward of a tree, since no call has raised it.

    Args:
        root: the outermost unit.
        issued: the collectives of this rank.
        groups: groups whose ranks issued different collectives, or train or average different parameters, or None.
        unreduced: parameter groups whose gradients some ranks alone had to reduce when others had set theirs.
    """
    names = some_of(sorted(f"{param_group.spec.unit_name!r}" for param_group in unreduced), 4)
    how = f"some ranks alone had gradients of these units that were not reduced: {names}"
    if groups is not None:
        own = some_of(issued.lines(groups, groups.shard), 8) or "no collective of a unit"
        how = (
            "ranks ran units in different orders, trained different parameters, or averaged different ones outside of "
            f"units. This rank issued {own}"
        )
    LOGGER.error(
        f"Rank {root.options.groups.shard.rank} of the shard group ends, and in the last backward of unit "
        f"{root.name!r} {how}. If an optimizer has stepped since, weights are wrong, and so is all that was written of "
        "them: go on from an earlier checkpoint. A state dict, save_checkpoint, clip_grad_norm_ or full_tensor() after "
        "the last backward raises this as an error that says how ranks differ."
    )
