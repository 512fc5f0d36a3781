"""Finds units whose modules torch.compile leaves as they are."""

from __future__ import annotations

from fsdp_flat.core import Iteration, Step
from fsdp_flat.guards.once_a_tree import OnceATree
from fsdp_flat.layout import COMPILED_MODULE
from fsdp_flat.user_warnings import warn_user


class CompiledModules(OnceATree):
    """Warns, at the first forward of a tree, of compilation that a caller asks for and does not get."""

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Warn if torch.compile skips units because they have no original parameters."""
        for unit in step.units if self.is_first(step) else ():
            if unit.options.use_orig_params:
                continue
            asked = [
                child
                for child in unit.module.modules()
                if COMPILED_MODULE in child._modules or child._compiled_call_impl is not None
            ]
            if iteration.compiler or any(getattr(child, "_is_fsdp_managed_module", False) for child in asked):
                warn_user(
                    f"torch.compile leaves modules of unit {unit.name!r}, and of every other unit below "
                    f"{step.root.name!r}, as they are: it compiles modules of units with use_orig_params=True only. "
                    "Training goes on without compilation; pass use_orig_params=True to have it."
                )
                return
