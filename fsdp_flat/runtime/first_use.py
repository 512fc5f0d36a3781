"""Checks and logs a tree at its first use and at its first backward."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

from fsdp_flat.errors import OptionError, UsageError
from fsdp_flat.runtime.unit import Unit
from fsdp_flat.runtime.unwritten import check_written

__all__ = ["check_gradients", "check_units", "check_values", "log_units"]

_logger = logging.getLogger("fsdp_flat")


def check_units(units: Sequence[Unit]) -> None:
    """Check options that must be the same in a tree, and optimizers that run in backward.

    Raises:
        OptionError: units differ in an option.
        UsageError: an optimizer runs in backward of a flat parameter.
    """
    options: dict[str, Callable[[Unit], bool]] = {
        "use_orig_params": lambda unit: unit.options.use_orig_params,
        "limit_all_gathers": lambda unit: unit.options.limit_all_gathers,
    }
    for option, value_of in options.items():
        first: dict[bool, str] = {}
        for unit in units:
            if unit.handles or option == "limit_all_gathers":
                first.setdefault(value_of(unit), unit.name)
        if len(first) > 1:
            described = "; ".join(f"{option}={value} in unit {name!r}" for value, name in first.items())
            raise OptionError(f"Every unit under one root must have the same {option}; got {described}.")
    for unit in units:
        for handle in unit.handles if not unit.options.use_orig_params else ():
            if any(hasattr(p, "_in_backward_optimizers") for p in (handle.flat_param, *handle.views.unsharded_params)):
                raise UsageError(
                    f"Unit {unit.name!r} has use_orig_params=False and parameters with an optimizer that runs in "
                    "backward (_apply_optimizer_in_backward), which needs use_orig_params=True."
                )


def check_values(units: Sequence[Unit]) -> None:
    """Report tensors that left the meta device and have no values at the first forward. Every rank must call this."""
    on_meta = [unit for unit in units if unit.unwritten is not None]
    if on_meta:
        options = on_meta[0].options
        entries = [(unit.name, entry) for unit in on_meta for entry in unit.unwritten or ()]
        check_written(entries, options.groups.rank_groups, options.device)
        for unit in on_meta:
            unit.unwritten = None


def check_gradients(units: Sequence[Unit]) -> None:
    """Check once, when the first gradients exist, for mistakes that would otherwise stay silent."""
    for unit in units:
        for handle in unit.handles:
            stale = handle.views.originals_in_optimizers()
            if stale:
                raise UsageError(
                    f"An optimizer holds {stale[0]!r} of unit {unit.name!r}, which wrapping replaced by a flat "
                    "parameter or by a part of its own, so its steps change nothing. Build the optimizer after "
                    "wrapping, from model.parameters(); parameters that are plain tensors stay what they are with "
                    "use_orig_params=True."
                )
    short = next((h for u in units for h in u.handles if h.is_trainable and h.orig_dtype.itemsize < 4), None)
    if short is not None:
        warnings.warn(
            f"{short.layout.param_infos[0].fqn!r} of unit {short.spec.unit_name!r} is sharded in {short.orig_dtype}, "
            "so an optimizer keeps its state and makes its updates in it too, where small updates are lost. Pass "
            "MixedPrecision(master_dtype=torch.float32), or convert the model before wrapping.",
            stacklevel=2,
        )


def log_units(units: Sequence[Unit]) -> None:
    """Log parameters, bytes, strategy and group sizes of each unit, one line a unit."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    for unit in units:
        groups = unit.options.groups
        _logger.info(
            "unit %r: %d parameters in %d bytes a rank, %s over %d x %d ranks (shard x replicate)",
            unit.name,
            sum(len(handle.layout.param_infos) for handle in unit.handles),
            sum(handle.flat_param.nbytes for handle in unit.handles),
            unit.options.strategy.member.name,
            groups.shard.size,
            groups.replicate.size,
        )
