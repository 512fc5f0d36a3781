"""Finds units whose modules torch.compile leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_flat.core import Iteration, Step, Unit
from fsdp_flat.guards.once_a_tree import OnceATree
from fsdp_flat.layout import COMPILED_MODULE
from fsdp_flat.user_warnings import warn_user


class CompiledModules(OnceATree):
    """Warns, at the first forward of a tree, of compilation that a caller asks for and does not get."""

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Warn if torch.compile skips units."""
        if self.is_first(step):
            _warn_of_uncompiled(step.units, iteration.compiler)


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
