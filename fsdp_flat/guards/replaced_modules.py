"""Finds modules that a program has replaced after wrapping, whose new parameters nothing reduces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_flat.core import Iteration, Step, Unit, unreduced_params
from fsdp_flat.guards.once_a_tree import OnceATree
from fsdp_flat.layout import clean_fqn, join_fqn
from fsdp_flat.user_warnings import warn_user


class ReplacedModules(OnceATree):
    """Warns, at the first forward of a tree that trains, of parameters that took the place of a unit's."""

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Warn of what :func:`replaced_params` finds, unless the caller has chosen whether to average its gradients."""
        root, root_module = step.root, step.root_module()
        if not iteration.trains or not self.is_first(step) or root_module is None:
            return
        has_chosen = root.averages_ignored is not None or root.options.groups.num_ranks == 1
        replaced = {} if has_chosen else replaced_params(root_module, step.units)
        if replaced:
            warn_user(
                f"Modules were replaced after wrapping, and no unit manages the new trainable parameters: "
                f"{', '.join(f'{name!r} (unit {replaced[name]!r})' for name in sorted(replaced))}. Each rank trains "
                "its own, and a state dict holds rank 0's; the unit keeps the parameter that was there. Replace "
                "modules (resize embeddings) before wrapping, or wrap again after fsdp_flat.unwrap(model); or call "
                "model.average_ignored_gradients() to have their gradients averaged, "
                "model.average_ignored_gradients(False) if that is done elsewhere."
            )


def replaced_params(root_module: nn.Module, units: Sequence[Unit]) -> dict[str, str]:
    """Return by name the trainable parameters that nothing reduces in the place of those of a unit, with its name."""
    paths = {module: clean_fqn(path) for path, module in root_module.named_modules()}
    gone = {
        join_fqn(paths[unit.module], site.fqn): unit.name
        for unit in units
        if unit.module in paths
        for param_group in unit.param_groups
        for entry in param_group.params
        for site in entry.sites
        if site.module not in paths
    }
    replaced = gone.keys() & unreduced_params(root_module, units) if gone else ()
    return {name: gone[name] for name in replaced}
