"""Checks and logs a tree at its first use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import attrgetter

from fsdp_flat.comm import is_simulated
from fsdp_flat.core.unit import Unit
from fsdp_flat.errors import OptionError, UsageError

_logger = logging.getLogger("fsdp_flat")
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
            if unit.options.api.shares_options and (unit.param_groups or option != "use_orig_params"):
                first.setdefault(attrgetter(path)(unit.options), unit.name)
        if len(first) > 1:
            described = "; ".join(f"{option}={value} in unit {name!r}" for value, name in first.items())
            raise OptionError(f"Every unit under one root must have the same {option}; got {described}.")
    for unit in units:
        for param_group in unit.param_groups:
            param_group.find_extensions()
        for param_group in unit.param_groups if not unit.options.use_orig_params else ():
            params = (param_group.storage.flat_param, *param_group.output.params)
            if any(hasattr(param, "_in_backward_optimizers") for param in params):
                raise UsageError(
                    f"Unit {unit.name!r} has use_orig_params=False and parameters with an optimizer that runs in "
                    "backward (_apply_optimizer_in_backward), which needs use_orig_params=True."
                )


def log_units(units: Sequence[Unit]) -> None:
    """Log strategy, ranks, parameters and bytes of each unit, one line per unit."""
    for unit in units if _logger.isEnabledFor(logging.INFO) else ():
        _logger.info("unit %r: %s", unit.name, unit.summary())
