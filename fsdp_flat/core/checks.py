"""Checks and logs a tree at its first use, and tells how ranks differ."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import NoReturn

from fsdp_flat.comm import CollectiveLog, ErrorTexts, RankGroup, ShardingGroups, agree, is_simulated
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.unit import Unit
from fsdp_flat.errors import OptionError, RankMismatchError, UsageError, some_of
from fsdp_flat.sizes import size_text
from fsdp_flat.user_warnings import warn_user

_logger = logging.getLogger("fsdp_flat")
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


# What has become of the gradients of ranks that differ, by whether it was found after they were set.
_EFFECT = {
    False: "This backward's gradients are dropped, and weights are as they were before this step.",
    True: "It was found after the backward had set its gradients: if an optimizer has stepped since, weights are wrong "
    "from that step on. Nothing was saved meanwhile; go on from the last checkpoint.",
}


# Options that all units of a tree share, with their places in a unit's options.
_SHARED_OPTIONS = {
    "use_orig_params": "use_orig_params",
    "limit_all_gathers": "limit_all_gathers",
    "FSDP_USE_FULL_PREC_IN_EVAL": "precision.full_in_eval",
}


def check_units(units: Sequence[Unit]) -> None:
    """Raise if ``units``, the root first, cannot be of one tree, or cannot communicate."""
    group = units[0].options.groups.process_group
    if is_simulated(group):
        raise UsageError(
            f"process_group of unit {units[0].name!r} is a {type(group).__name__}, which has rank() and size() but "
            "cannot communicate: a model can be wrapped with it, and not run. Pass a process group of "
            "torch.distributed, or None for the default one."
        )
    for unit in units[1:]:
        if unit.control.finalizes_by_hand:
            raise UsageError(
                f"set_manual_backward_finalization(True) was called on unit {unit.name!r}, which is nested in "
                f"{units[0].name!r}. Call it on the outermost unit."
            )
    for option, path in _SHARED_OPTIONS.items():
        first: dict[bool, str] = {}
        for unit in units:
            if unit.options.front.shares_options and (unit.param_groups or option != "use_orig_params"):
                first.setdefault(attrgetter(path)(unit.options), unit.name)
        if len(first) > 1:
            described = "; ".join(f"{option}={value} in unit {name!r}" for value, name in first.items())
            raise OptionError(f"Every unit under one root must have the same {option}; got {described}.")
    for unit in units:
        for param_group in unit.param_groups:
            param_group.find_extensions()
        for param_group in unit.param_groups if not unit.options.use_orig_params else ():
            if any(hasattr(p, "_in_backward_optimizers") for p in (param_group.flat_param, *param_group.buffer.params)):
                raise UsageError(
                    f"Unit {unit.name!r} has use_orig_params=False and parameters with an optimizer that runs in "
                    "backward (_apply_optimizer_in_backward), which needs use_orig_params=True."
                )


def budget_of(units: Sequence[Unit]) -> int | None:
    """Return the bytes of unsharded parameters that a tree keeps for backward by its budget; None without a budget.

    Raises an OptionError if ``units`` have several budgets.
    """
    budgets: dict[int, str] = {}
    for unit in units:
        strategy = unit.options.strategy
        if strategy.budget_nbytes is not None:
            budgets.setdefault(strategy.budget_nbytes, f"{strategy.budget} in unit {unit.name!r}")
    if len(budgets) > 1:
        raise OptionError(f"The units of a tree share one memory budget; got {'; '.join(budgets.values())}.")
    return next(iter(budgets), None)


def report_kept(kept: Sequence[Unit], candidates: Sequence[Unit], nbytes: int) -> None:
    """Log the units that a memory budget keeps for backward; warn if it is too small for any of ``candidates``."""
    names = ", ".join(repr(unit.name) for unit in kept) or "none"
    stay = "unit stays" if len(kept) == 1 else "units stay"
    budget = size_text(nbytes)
    _logger.info("memory budget of %s: %d %s unsharded from forward to backward: %s", budget, len(kept), stay, names)
    if nbytes and candidates and not kept:
        smallest = min(candidates, key=lambda unit: unit.buffer_nbytes)
        warn_user(
            f"The memory budget of {budget} keeps no unit unsharded for backward: unit {smallest.name!r}, the "
            f"smallest, takes {size_text(smallest.buffer_nbytes)}. Give a larger budget, or leave it out."
        )


def all_rank_groups(groups: Iterable[ShardingGroups]) -> list[RankGroup]:
    """Return every process group of the given ones, each once."""
    return list(dict.fromkeys(rank_group for each in groups for rank_group in each.rank_groups))


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
        for param_info, trains in zip(param_group.layout.param_infos, param_group.shown.requires_grad(), strict=True)
    ]


def raise_difference(
    collectives: CollectiveLog,
    averaged: Sequence[str],
    units: Sequence[Unit],
    groups: ShardingGroups,
    *,
    is_late: bool,
) -> NoReturn:
    """Raise a RankMismatchError that shows how ranks differ. Every rank of the groups must call this.

    ``collectives`` are those that this rank has issued, and ``averaged`` has one line for each parameter outside of
    units whose gradient this rank is to average. It ``is_late`` if gradients are set already.
    """
    issued = partial(collectives.lines, groups)
    for lines, texts in ((issued, _ORDER), (trained_lines(units, [groups]), TRAINED), (averaged, _AVERAGED)):
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
    root: Unit, collectives: CollectiveLog, groups: ShardingGroups | None, unreduced: Iterable[ParamGroup]
) -> None:
    """Log at the end of the process that ranks differed in the last backward of a tree, since no call has raised it.

    Args:
        root: the outermost unit.
        collectives: those that this rank has issued.
        groups: groups whose ranks issued different collectives, or train or average different parameters, or None.
        unreduced: parameter groups whose gradients some ranks alone had to reduce when others had set theirs.
    """
    names = some_of(sorted(f"{param_group.spec.unit_name!r}" for param_group in unreduced), 4)
    how = f"some ranks alone had gradients of these units that were not reduced: {names}"
    if groups is not None:
        own = some_of(collectives.lines(groups, groups.shard), 8) or "no collective of a unit"
        how = (
            "ranks ran units in different orders, trained different parameters, or averaged different ones outside of "
            f"units. This rank issued {own}"
        )
    _logger.error(
        f"Rank {root.options.groups.shard.rank} of the shard group ends, and in the last backward of unit "
        f"{root.name!r} {how}. If an optimizer has stepped since, weights are wrong, and so is all that was written of "
        "them: go on from an earlier checkpoint. A state dict, save_checkpoint, clip_grad_norm_ or full_tensor() after "
        "the last backward raises this as an error that says how ranks differ."
    )


def log_units(units: Sequence[Unit]) -> None:
    """Log strategy, ranks, parameters and bytes of each unit, one line per unit."""
    for unit in units if _logger.isEnabledFor(logging.INFO) else ():
        _logger.info("unit %r: %s", unit.name, unit.summary())
