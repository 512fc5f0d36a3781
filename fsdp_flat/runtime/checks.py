"""Checks and logs a tree at its first use and at its first backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_flat.comm import ErrorTexts, RankGroup, ShardingGroups, agree, is_simulated
from fsdp_flat.errors import OptionError, RankMismatchError, UsageError, counted, some_of
from fsdp_flat.flat import ParamGroup
from fsdp_flat.layout import COMPILED_MODULE, clean_fqn, join_fqn
from fsdp_flat.runtime.unit import Unit
from fsdp_flat.runtime.unmanaged import RankZeroTensors, unreduced_params, warn_of_unsynchronized
from fsdp_flat.user_warnings import warn_user

_logger = logging.getLogger("fsdp_flat")
_WRITTEN = ErrorTexts("checking weights that left the meta device")
_TRAINED = ErrorTexts(
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
            if unit.options.front.shares_options and (unit.handles or option != "use_orig_params"):
                first.setdefault(attrgetter(path)(unit.options), unit.name)
        if len(first) > 1:
            described = "; ".join(f"{option}={value} in unit {name!r}" for value, name in first.items())
            raise OptionError(f"Every unit under one root must have the same {option}; got {described}.")
    for unit in units:
        for handle in unit.handles:
            handle.shown.check_plain()
        for handle in unit.handles if not unit.options.use_orig_params else ():
            if any(hasattr(p, "_in_backward_optimizers") for p in (handle.flat_param, *handle.buffer.params)):
                raise UsageError(
                    f"Unit {unit.name!r} has use_orig_params=False and parameters with an optimizer that runs in "
                    "backward (_apply_optimizer_in_backward), which needs use_orig_params=True."
                )


def _unwritten(units: Iterable[Unit], *, params: bool) -> list[str]:
    """Return names of parameters, or of buffers, that left the meta device and still have no values."""
    return [
        f"{entry.fqn!r} of unit {unit.name!r}"
        for unit in units
        for entry in unit.unwritten or ()
        if entry.is_param is params and entry.is_still
    ]


def _unwritten_error(units: Iterable[Unit]) -> UsageError | None:
    """Return an error that lists the parameters without values, or None; warn of buffers."""
    buffers, params = _unwritten(units, params=False), _unwritten(units, params=True)
    if buffers:
        warn_user(
            f"Buffers left the meta device and were never written, so their values are undefined: {', '.join(buffers)}"
            ". A state dict holds persistent buffers only; compute the others in reset_parameters() or param_init_fn."
        )
    if not params:
        return None
    return UsageError(
        f"Parameters left the meta device and were never written, so their values are undefined: "
        f"{', '.join(params)}. Initialise them in reset_parameters() or param_init_fn, or load them."
    )


def _check_values(units: Sequence[Unit]) -> None:
    """Raise if a parameter that left the meta device has no values, here or on another rank.

    Every rank must call this. This rank's error is exchanged over all groups, since ranks that are in one of them alone
    would otherwise wait forever.
    """
    # Units of fully_shard leave it by to_empty, perhaps on some ranks only, and a caller may know that nothing reads
    # a parameter.
    left = _unwritten([unit for unit in units if unit.options.front.stays_on_meta], params=True)
    if left:
        warn_user(
            f"{counted(len(left), 'parameters')} left the meta device by to_empty, never written and so NaN: "
            f"{some_of(left, 4)}. Call the model's init_weights() or each module's reset_parameters(), or load a state "
            "dict, between to_empty and the first forward."
        )
    left_meta = [unit for unit in units if unit.unwritten is not None and not unit.options.front.stays_on_meta]
    if left_meta:
        rank_groups = _rank_groups_of(unit.options.groups for unit in (units[0], *left_meta))
        agree((), _unwritten_error(left_meta), rank_groups, left_meta[0].options.device, _WRITTEN)
    for unit in units:
        unit.unwritten = None


def _warn_of_uncompiled(units: Sequence[Unit], compiler: Any) -> None:
    """Warn if torch.compile would skip units because they have no original parameters.

    ``compiler`` compiles the code that calls the outermost unit; None if nothing does.
    """
    for unit in units:
        if unit.options.use_orig_params:
            continue
        asked = [m for m in unit.module.modules() if COMPILED_MODULE in m._modules or m._compiled_call_impl is not None]
        if compiler or any(getattr(module, "_is_fsdp_managed_module", False) for module in asked):
            warn_user(
                f"torch.compile leaves modules of unit {unit.name!r}, and of every other unit below "
                f"{units[0].name!r}, as they are: it compiles modules of units with use_orig_params=True only. "
                "Training goes on without compilation; pass use_orig_params=True to have it."
            )
            return


def _warn_of_replaced(root_module: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of trainable parameters that nothing reduces, in the place of parameters that a unit still holds.

    There is no warning if the caller has chosen whether to average gradients that no unit manages.
    """
    if units[0].averages_ignored is not None or units[0].options.groups.num_ranks == 1:
        return
    paths = {module: clean_fqn(path) for path, module in root_module.named_modules()}
    gone = {
        join_fqn(paths[unit.module], site.fqn): unit.name
        for unit in units
        if unit.module in paths
        for handle in unit.handles
        for entry in handle.params
        for site in entry.sites
        if site.module not in paths
    }
    replaced = gone.keys() & unreduced_params(root_module, units) if gone else ()
    if replaced:
        warn_user(
            f"Modules were replaced after wrapping, and no unit manages the new trainable parameters: "
            f"{', '.join(f'{name!r} (unit {gone[name]!r})' for name in sorted(replaced))}. Each rank trains its own, "
            "and a state dict holds rank 0's; the unit keeps the parameter that was there. Replace modules (resize "
            "embeddings) before wrapping, or wrap again after fsdp_flat.unwrap(model); or call "
            "model.average_ignored_gradients() to have their gradients averaged, "
            "model.average_ignored_gradients(False) if that is done elsewhere."
        )


def _rank_groups_of(groups: Iterable[ShardingGroups]) -> list[RankGroup]:
    return list(dict.fromkeys(rank_group for each in groups for rank_group in each.rank_groups))


def _trained_lines(units: Iterable[Unit], over: Sequence[ShardingGroups]) -> list[str]:
    # Names may differ between ranks that ignore different modules; wrapping has compared them.
    return [
        f"{mesh.unit_id or mesh.name} {number} {param_info.shape} {trains}\t"
        f"parameter {param_info.fqn!r} of unit {mesh.name!r} with requires_grad={trains}"
        for groups in over
        for unit in units
        for mesh in unit.meshes
        if mesh.groups == groups
        for number, handle in enumerate(mesh.handles)
        for param_info, trains in zip(handle.layout.param_infos, handle.shown.requires_grad(), strict=True)
    ]


def raise_difference(
    collectives: Sequence[str],
    averaged: Sequence[str],
    units: Sequence[Unit],
    groups: ShardingGroups,
    *,
    is_late: bool,
) -> NoReturn:
    """Raise a RankMismatchError that shows how ranks differ. Every rank of the groups must call this.

    ``collectives`` has one line for each collective over the groups that this rank has issued, and ``averaged`` one for
    each parameter outside of units whose gradient this rank is to average. It ``is_late`` if gradients are set already.
    """
    for lines, texts in ((collectives, _ORDER), (_trained_lines(units, [groups]), _TRAINED), (averaged, _AVERAGED)):
        texts = replace(texts, advice=f"{texts.advice} {_EFFECT[is_late]}")
        agree(lines, None, groups.rank_groups, units[0].options.device, texts)
    raise AssertionError("digests of a backward differ between ranks, and nothing that they cover does")


def late_gradients(handles: Iterable[ParamGroup]) -> RankMismatchError:
    """Return the error for gradients that some ranks alone had to reduce when others had set theirs already."""
    names = some_of(sorted(f"{handle.spec.unit_name!r}" for handle in handles), 4)
    return RankMismatchError(
        f"At the end of the last backward some ranks alone had gradients of these units that were not reduced yet: "
        f"{names}. They came after the unit's own backward, from weights used outside of its forward, or from no_sync "
        f"on those ranks alone, and the other ranks had set their gradients already. Do the same on every rank. "
        f"{_EFFECT[True]}"
    )


class RankChecks:
    """Compares ranks in their first steps, each time where the step communicates over the same ranks anyway.

    ``in_forward`` is True while :meth:`before_forward` may still compare.
    """

    def __init__(self, root_module: nn.Module, units: Sequence[Unit]) -> None:
        self._root_module = weakref.ref(root_module)
        self._units = units
        self._groups = list(dict.fromkeys(mesh.groups for unit in units for mesh in unit.meshes if mesh.handles))
        # Groups over which no forward has compared yet.
        self._ahead = {
            mesh.groups for unit in units for mesh in unit.meshes if mesh.handles and mesh.collectives is not None
        }
        self._checked_values = False
        self._checked_modules = False
        self._compared_in_backward = False
        self._checked_reduction = False
        self.in_forward = bool(self._ahead)

    def before_iteration(self, compiler: Any) -> None:
        """Check before the first forward for tensors without values, before one that trains for replaced modules."""
        if not self._checked_values:
            _check_values(self._units)
            _warn_of_uncompiled(self._units, compiler)
            self._checked_values = True
        if not self._checked_modules and torch.is_grad_enabled():
            self._checked_modules = True
            root_module = self._root_module()
            if root_module is not None:
                _warn_of_replaced(root_module, self._units)

    def before_forward(self, unit: Unit) -> None:
        """Compare which parameters are trained, before the first forward with gradients over a unit's groups."""
        if not unit.needs_all_gather or not torch.is_grad_enabled():
            return
        for groups in [mesh.groups for mesh in unit.meshes if mesh.groups in self._ahead]:
            agree(_trained_lines(self._units, [groups]), None, [groups.shard], unit.options.device, _TRAINED)
            self._ahead.remove(groups)
            self.in_forward = bool(self._ahead)

    def before_backward(self) -> None:
        """Compare which parameters are trained, before the first backward that all-reduces gradients over replicas."""
        if self._compared_in_backward or not any(unit.is_trainable for unit in self._units):
            return
        replicated = [groups for groups in self._groups if groups.replicate.size > 1]
        if replicated:
            # What ranks find over the groups of an inner unit is exchanged over those of the outermost one too.
            rank_groups = _rank_groups_of([self._units[0].options.groups, *replicated])

            def lines_of(rank_group: RankGroup) -> list[str]:
                return _trained_lines(self._units, [each for each in replicated if rank_group in each.rank_groups])

            agree(lines_of, None, rank_groups, self._units[0].options.device, _TRAINED)
        self._compared_in_backward = True

    def after_reduction(self) -> None:
        """Check, when the first reduced gradients exist, for mistakes that would otherwise stay silent."""
        if self._checked_reduction:
            return
        self._checked_reduction = True
        options, root_module = self._units[0].options, self._root_module()
        if root_module is not None:
            tensors = RankZeroTensors(root_module)
            tensors.compare(_rank_groups_of(self._groups or [options.groups]), options.device)
            tensors.warn()
        warn_of_unsynchronized(self._units)
        handles = [handle for unit in self._units for handle in unit.handles]
        short = next((each for each in handles if each.shown.num_trainable and each.orig_dtype.itemsize < 4), None)
        if short is not None:
            warn_user(
                f"{short.layout.param_infos[0].fqn!r} of unit {short.spec.unit_name!r} is sharded in "
                f"{short.orig_dtype}, so an optimizer keeps its state and makes its updates in it too, where small "
                "updates are lost. Convert the model to torch.float32 before it is sharded, and compute in low "
                "precision by param_dtype; or pass MixedPrecision(master_dtype=torch.float32) to "
                "FullyShardedDataParallel."
            )


def log_units(units: Sequence[Unit]) -> None:
    """Log strategy, ranks, parameters and bytes of each unit, one line per unit."""
    for unit in units if _logger.isEnabledFor(logging.INFO) else ():
        _logger.info("unit %r: %s", unit.name, unit.summary())
