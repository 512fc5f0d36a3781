"""Walks a tree bottom up for a function policy, and provides FSDP1's two helpers that apply policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp_flat.errors import PhaseError
from fsdp_flat.wrap.tree import Places, _wrap, describe_module, named_children, post_order, require_module

__all__ = ["Walk"]


@dataclass(slots=True)
class Walk:
    """Calls a function policy on a tree, in FSDP1's order and with FSDP1's numbers, and changes nothing.

    ``nonwrapped_numel`` counts a module's parameters once each, without the ignored ones; with ``recurse=False`` the
    elements in units below are subtracted, once for each unit (twice for a weight shared by two units, as in FSDP1). A
    module found at a second place counts as the first time, and the policy is not called again.

    Attributes:
        policy: the function.
        ignored_modules: children that are skipped, with everything below them.
        ignored_params: parameters that are not counted.
        chosen: the modules to wrap.
    """

    policy: Callable[..., bool]
    ignored_modules: set[nn.Module]
    ignored_params: set[nn.Parameter]
    chosen: set[nn.Module] = field(default_factory=set)
    _covered: dict[nn.Module, int] = field(default_factory=dict)

    def visit(self, module: nn.Module, *, only_children: bool = False) -> int:
        """Walk ``module`` and return the number of its elements that are now in units."""
        if module in self._covered:
            return self._covered[module]
        numel = sum(param.numel() for param in module.parameters() if param not in self.ignored_params)
        covered = 0
        if self.policy(module=module, recurse=True, nonwrapped_numel=numel):
            for _, child in named_children(module):
                if child not in self.ignored_modules:
                    covered += self.visit(child)
            if not only_children and self.policy(module=module, recurse=False, nonwrapped_numel=numel - covered):
                self.chosen.add(module)
                covered = numel
        self._covered[module] = covered
        return covered


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap the modules that a function policy chooses, in place.

    The policy is called for the whole tree before anything is wrapped.

    Args:
        module: the tree.
        auto_wrap_policy: a function policy.
        wrapper_cls: called as ``wrapper_cls(submodule, **kwargs)``.
        ignored_modules: modules that are skipped.
        ignored_params: parameters that are not counted.
        only_wrap_children: do not wrap ``module`` itself.
        **kwargs: the wrapper's keyword arguments.

    Returns:
        ``module``, wrapped if it was chosen, and the number of elements that are now in units.

    Raises:
        PhaseError: if policy or wrapper are None, or a submodule is already a ``wrapper_cls``.
    """
    if auto_wrap_policy is None:
        raise PhaseError("auto_wrap_policy is None. Pass a function policy, for example always_wrap_policy.")
    if wrapper_cls is None:
        raise PhaseError("wrapper_cls is None. Pass the class to wrap with.")
    wrapped_types: tuple[type, ...] = (
        (wrapper_cls,) if isinstance(wrapper_cls, type) else ()
    )  # a function has no instances
    for path, submodule in module.named_modules():
        already = isinstance(submodule, wrapped_types)
        if already and submodule not in ignored_modules:
            raise PhaseError(
                f"{describe_module(submodule, path)} is already wrapped by {type(submodule).__name__}. "
                "Wrap by hand or by policy, not both, or put it in ignored_modules."
            )
    walk = Walk(auto_wrap_policy, ignored_modules, ignored_params)
    numel = walk.visit(module, only_children=only_wrap_children)
    places = Places.find(module)
    for path, submodule in post_order(module):
        if submodule in walk.chosen:
            wrapped = require_module(_wrap(submodule, wrapper_cls, **kwargs), describe_module(submodule, path))
            if submodule is module:
                return wrapped, numel
            places.replace(submodule, wrapped)
    return module, numel


def _construct_wrap_fn(
    root_module: nn.Module,
    target_module_to_kwargs: dict[nn.Module, dict[str, Any]],
    fsdp_fn: Callable[..., nn.Module],
) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function for ``_post_order_apply`` that wraps the given modules, except the root.

    Args:
        root_module: the tree; wrapping the root is left to the caller.
        target_module_to_kwargs: the modules to wrap, each with its keyword arguments.
        fsdp_fn: called as ``fsdp_fn(module, **kwargs)``.
    """

    def wrap_target(module: nn.Module) -> nn.Module | None:
        if module is root_module or module not in target_module_to_kwargs:
            return None
        return fsdp_fn(module, **target_module_to_kwargs[module])

    return wrap_target
