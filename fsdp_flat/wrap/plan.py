"""Plans units by a policy: decides first, changes the tree afterwards.

Deliberate differences from FSDP1: a function policy is called for the whole tree before anything is wrapped; a module
registered at several places becomes one unit at all of them (FSDP1 wraps the first, or each separately).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.layout import clean_fqn
from fsdp_flat.wrap.checks import (
    check_policy,
    check_uniform_requires_grad,
    explain_unbound,
    named_classes,
    raise_wrapped,
    warn_full_precision,
    warn_no_match,
    warn_unmatched,
)
from fsdp_flat.wrap.policies import PolicyObject, _or_policy, _wrap_module_cls_individually
from fsdp_flat.wrap.tree import (
    Places,
    _post_order_apply,
    _wrap,
    compiled_forms,
    describe_module,
    named_children,
    post_order,
    require_module,
    wrap_overrides,
)


@dataclass(frozen=True, slots=True, eq=False)
class UnitPlan:
    """Describes a submodule that becomes a unit.

    Attributes:
        fqn: its first path below the root, without wrapper components.
        module: the submodule.
        kwargs: keyword arguments of its wrapper, in a separate dict.
    """

    fqn: str
    module: nn.Module
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class WrapPlan:
    """Holds the units that a policy chose in a tree.

    Attributes:
        units: children before parents; the root is never among them.
        full_precision: modules of the classes that the root's mixed precision excludes, including the root and ignored
            modules. As in FSDP1, their inputs must be cast to float32 and their outputs back.
    """

    units: tuple[UnitPlan, ...]
    full_precision: tuple[nn.Module, ...] = ()


def plan_units(
    root: nn.Module,
    policy: PolicyObject | Callable[..., bool],
    *,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
    is_wrapped: Callable[[nn.Module], bool] | None = None,
    stacklevel: int = 5,
) -> WrapPlan:
    """Decide which submodules of ``root`` become units, and change nothing.

    Args:
        root: the module being wrapped.
        policy: a function policy or a policy object, ours or made from FSDP1's.
        ignored_modules: modules that never become units.
        ignored_params: parameters that no unit manages.
        root_kwargs: the wrapper's keyword arguments that units inherit; ``mixed_precision`` and ``use_orig_params`` are
            read too.
        is_wrapped: returns whether a module is, or belongs to, a unit already; None to skip the check.
        stacklevel: of warnings, see ``warn_user``; by default that of the code that calls the wrapper's constructor.

    Returns:
        The plan. If ``torch.compile(module)`` holds a module, the compiled form becomes the unit. Units of a
        policy object have ``auto_wrap_policy=None`` among their keyword arguments.

    Raises:
        OptionError: a submodule is wrapped already; a unit without original parameters mixes frozen and trainable ones;
            a CustomPolicy function returned an invalid value.
        OptionTypeError: the policy is not a policy, or names an object that is not a module class.
        PhaseError: the policy is None.
    """
    check_policy(policy)
    classes = named_classes(policy)
    ordered = post_order(root)
    if is_wrapped is not None and any(is_wrapped(module) for _, module in ordered):
        raise_wrapped(root, is_wrapped)
    mixed_precision = root_kwargs.get("mixed_precision")
    exempt = () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)

    if isinstance(policy, PolicyObject):
        targets = _ask_object(policy, root, ignored_modules, root_kwargs, exempt)
    else:
        # FSDP1 combines the policies even if no class is exempt; the policy then cannot stop the walk any more.
        asked = policy if mixed_precision is None else _and_also(policy, exempt)
        targets = _ask_function(asked, policy, root, ignored_modules, ignored_params, root_kwargs)
    for module, kwargs in targets.items():
        if isinstance(module, exempt):
            kwargs["mixed_precision"] = None
    compiled = compiled_forms(module for _, module in ordered)
    targets = {compiled.get(module, module): kwargs for module, kwargs in targets.items()}

    units = tuple(
        UnitPlan(clean_fqn(path), module, targets[module])
        for path, module in ordered
        if module in targets and module is not root
    )
    managed = [(unit.fqn, unit.module, unit.kwargs) for unit in units]
    check_uniform_requires_grad([*managed, ("", root, root_kwargs)], ignored_params)

    full_precision = tuple(module for module in root.modules() if isinstance(module, exempt)) if exempt else ()
    warn_full_precision(root, full_precision, stacklevel=stacklevel + 1)
    if classes is not None and all(isinstance(unit.module, exempt) for unit in units):
        warn_no_match(root, classes, ignored_params, stacklevel=stacklevel + 1)
    elif classes is not None:
        warn_unmatched(root, classes, stacklevel=stacklevel + 1)
    return WrapPlan(units, full_precision)


def apply_plan(root: nn.Module, plan: WrapPlan, wrapper: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> None:
    """Replace each planned module by ``wrapper(module, kwargs)``, wherever it is registered below ``root``.

    Args:
        root: the module that the plan was made for.
        plan: from :func:`plan_units`.
        wrapper: called once for each unit, children first.

    Raises:
        UsageError: if a planned module is no longer in the tree; nothing has been wrapped then.
        PhaseError: if ``wrapper`` does not return a module.
    """
    places = Places.find(root)
    for unit in plan.units:
        if unit.module not in places.of:
            raise UsageError(
                f"{describe_module(unit.module, unit.fqn)} is no longer in {type(root).__name__}: the tree was changed "
                "after plan_units. Apply a plan right after making it, and once."
            )
    for unit in plan.units:
        wrapped = wrapper(unit.module, dict(unit.kwargs))
        places.replace(unit.module, require_module(wrapped, describe_module(unit.module, unit.fqn)))


def _and_also(policy: Callable[..., bool], exempt: tuple[type[nn.Module], ...]) -> Callable[..., bool]:
    """Combine the policy with one that makes each module of the exempt classes a separate unit."""
    return partial(_or_policy, policies=[policy, partial(_wrap_module_cls_individually, module_classes=exempt)])


@dataclass(slots=True)
class _Walk:
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


def _ask_object(
    policy: PolicyObject,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    root_kwargs: dict[str, Any],
    exempt: tuple[type[nn.Module], ...],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy object chose, each with a separate dict of keyword arguments."""
    inherited = {**root_kwargs, "auto_wrap_policy": None}
    chosen = policy._run_policy(root, ignored_modules, dict(inherited))
    targets = {module: dict(kwargs) for module, kwargs in chosen.items()}
    for module in root.modules() if exempt else ():
        if module not in ignored_modules and isinstance(module, exempt):
            targets.setdefault(module, dict(inherited))
    return targets


def _ask_function(
    asked: Callable[..., bool],
    policy: Callable[..., bool],
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a function policy chose, each with a separate dict of keyword arguments."""
    walk = _Walk(asked, ignored_modules, ignored_params)
    try:
        walk.visit(root, only_children=True)
    except TypeError as error:
        explain_unbound(policy, error)
        raise
    return {module: {**root_kwargs, **wrap_overrides(module)} for module in walk.chosen}


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap the modules that a function policy chooses, in place, as ``wrapper_cls(submodule, **kwargs)``.

    Returns:
        ``module``, wrapped if it was chosen and not ``only_wrap_children``, and the number of elements now in units.

    Raises:
        PhaseError: if policy or wrapper are None, or a submodule is already a ``wrapper_cls``.
    """
    if auto_wrap_policy is None:
        raise PhaseError("auto_wrap_policy is None. Pass a function policy, for example always_wrap_policy.")
    if wrapper_cls is None:
        raise PhaseError("wrapper_cls is None. Pass the class to wrap with.")
    for path, submodule in module.named_modules():
        # A function has no instances.
        already = isinstance(wrapper_cls, type) and isinstance(submodule, wrapper_cls)
        if already and submodule not in ignored_modules:
            raise PhaseError(
                f"{describe_module(submodule, path)} is already wrapped by {type(submodule).__name__}. "
                "Wrap by hand or by policy, not both, or put it in ignored_modules."
            )
    walk = _Walk(auto_wrap_policy, ignored_modules, ignored_params)
    numel = walk.visit(module, only_children=only_wrap_children)
    below = walk.chosen - {module}
    _post_order_apply(module, lambda child: _wrap(child, wrapper_cls, **kwargs) if child in below else None)
    if module not in walk.chosen:
        return module, numel
    return require_module(_wrap(module, wrapper_cls, **kwargs), describe_module(module, "")), numel
