"""Plans units by a policy: decides first, changes the tree afterwards.

Deliberate differences from FSDP1: a function policy is called for the whole tree before anything is wrapped; a module
registered at several places becomes one unit at all of them (FSDP1 wraps the first, or each separately).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import nn

from fsdp_flat.errors import OptionError, counted, some_of
from fsdp_flat.layout import COMPILED_MODULE, clean_fqn, join_fqn
from fsdp_flat.user_warnings import warn_user
from fsdp_flat.wrap.policies import (
    _or_policy,
    _wrap_module_cls_individually,
    check_policy,
    describe_module,
    explain_unbound,
    is_policy_object,
    named_classes,
    overrides_of,
)

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True, eq=False)
class UnitPlan:
    """Describes a submodule that becomes a unit, with its first path and the keyword arguments of its wrapper."""

    fqn: str
    module: nn.Module
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class WrapPlan:
    """Holds the units that a policy chose in a tree: children before parents, without the root.

    ``full_precision`` are the modules of the classes that the root's mixed precision excludes, including the root and
    ignored modules. As in FSDP1, their inputs must be cast to float32 and their outputs back.
    """

    units: tuple[UnitPlan, ...]
    full_precision: tuple[nn.Module, ...] = ()


def plan_units(
    root: nn.Module,
    policy: Any,
    *,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
    is_wrapped: Callable[[nn.Module], bool] | None = None,
) -> WrapPlan:
    """Decide which submodules of ``root`` become units, and change nothing.

    If ``torch.compile(module)`` holds a module, the compiled form becomes the unit.

    Args:
        root: the module being wrapped.
        policy: a function policy or a policy object, ours or FSDP1's.
        ignored_modules: modules that never become units.
        ignored_params: parameters that no unit manages.
        root_kwargs: the wrapper's keyword arguments that units inherit.
        is_wrapped: returns whether a module is, or belongs to, a unit already; None to skip the check.
    """
    check_policy(policy)
    classes = named_classes(policy)
    ordered = _post_order(root)
    if is_wrapped is not None and any(is_wrapped(module) for _, module in ordered):
        path, module = next((path, module) for path, module in root.named_modules() if is_wrapped(module))
        raise OptionError(
            f"auto_wrap_policy cannot be used on {type(root).__name__}: {describe_module(module, path)} is wrapped "
            "already. Wrap either by hand (and pass no policy for the root) or by policy."
        )
    mixed_precision = root_kwargs.get("mixed_precision")
    exempt = () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)
    full_precision = tuple(module for module in root.modules() if isinstance(module, exempt))
    chosen, declined = _ask_policy(
        policy, root, ignored_modules, ignored_params, root_kwargs=root_kwargs, exempt=exempt
    )
    # The result of torch.compile(module) keeps calling that module, even if it is replaced in the tree.
    compiled = {module._modules[COMPILED_MODULE]: module for _, module in ordered if COMPILED_MODULE in module._modules}
    targets = {
        compiled.get(module, module): {**kwargs, **({"mixed_precision": None} if isinstance(module, exempt) else {})}
        for module, kwargs in chosen.items()
    }

    units = tuple(
        UnitPlan(clean_fqn(path), module, targets[module])
        for path, module in ordered
        if module in targets and module is not root
    )
    _check_uniform_requires_grad([*units, UnitPlan("", root, root_kwargs)], ignored_params)

    if full_precision:
        counts = Counter(type(module).__name__ for module in full_precision)
        warn_user(
            f"mixed_precision and auto_wrap_policy are both given for {type(root).__name__}, which has modules that "
            f"stay in full precision: {_counted(counts)}. Each becomes a unit of its own with mixed_precision=None. "
            "To run them in low precision too, pass MixedPrecision(..., _module_classes_to_ignore=())."
        )
    has_units = not all(isinstance(unit.module, exempt) for unit in units)
    if classes is not None:
        _warn_of_unmatched(root, classes, ignored_params, has_units=has_units)
    elif not has_units and root not in chosen and not declined:
        _warn_of_one_unit(root, ignored_params)
    return WrapPlan(units, full_precision)


def apply_plan(root: nn.Module, plan: WrapPlan, wrapper: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> None:
    """Replace each planned module by ``wrapper(module, kwargs)``, wherever it is registered; children first."""
    # Each module of the tree, with every (parent, name) that it is registered at.
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        # named_children() hides a second name of the same child, so the dictionary itself is read.
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    for unit in plan.units:
        wrapped = wrapper(unit.module, unit.kwargs)
        for parent, name in places[unit.module]:
            setattr(parent, name, wrapped)


def _ask_policy(
    policy: Any,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    *,
    root_kwargs: dict[str, Any],
    exempt: tuple[type[nn.Module], ...],
) -> tuple[dict[nn.Module, dict[str, Any]], bool]:
    """Return the modules that a policy chooses, and those of the ``exempt`` classes, with their keyword arguments.

    Also return whether the policy has declined to look below ``root``, as a size policy does with a small model.

    A function policy is called in FSDP1's order and with FSDP1's numbers: ``nonwrapped_numel`` counts a module's
    parameters once each, without the ignored ones; with ``recurse=False`` the elements in units below are subtracted,
    once for each unit (twice for a weight shared by two units, as in FSDP1). A module found at a second place counts as
    the first time, and the policy is not called again.
    """
    if is_policy_object(policy):
        inherited = {**root_kwargs, "auto_wrap_policy": None}
        added = [each for each in root.modules() if isinstance(each, exempt) and each not in ignored_modules]
        return {**dict.fromkeys(added, inherited), **policy._run_policy(root, ignored_modules, dict(inherited))}, False
    declined = False

    def own_policy(**question: Any) -> bool:
        nonlocal declined
        answer = policy(**question)
        declined |= question["module"] is root and not answer
        return answer

    asked: Callable[..., bool] = own_policy
    if root_kwargs.get("mixed_precision") is not None:
        # FSDP1 combines the policies even if no class is exempt; the policy then cannot stop the walk any more.
        asked = partial(
            _or_policy, policies=[own_policy, partial(_wrap_module_cls_individually, module_classes=exempt)]
        )
    chosen: dict[nn.Module, dict[str, Any]] = {}
    covered: dict[nn.Module, int] = {}

    def visit(module: nn.Module) -> int:
        if module in covered:
            return covered[module]
        numel = sum(param.numel() for param in module.parameters() if param not in ignored_params)
        below = 0
        if asked(module=module, recurse=True, nonwrapped_numel=numel):
            # A loop: a generator would double the depth of the recursion.
            for _, child in module.named_children():
                if child is not None and child not in ignored_modules:
                    below += visit(child)
            if module is not root and asked(module=module, recurse=False, nonwrapped_numel=numel - below):
                chosen[module] = {**root_kwargs, **overrides_of(module)}
                below = numel
        covered[module] = below
        return below

    try:
        visit(root)
    except TypeError as error:
        explain_unbound(policy, error)
        raise
    return chosen, declined


def _check_uniform_requires_grad(units: Sequence[UnitPlan], ignored_params: set[nn.Parameter]) -> None:
    """Raise if a unit without original parameters has frozen and trainable ones; name the first, and its parameters."""
    visited: set[nn.Module] = set()
    for unit in units:
        by_kind: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        visited.add(unit.module)
        queue = [(unit.fqn, unit.module)]
        for prefix, module in queue:
            for name, param in module._parameters.items():
                if param is not None and param not in ignored_params:
                    by_kind[param.requires_grad].append((prefix, name))
            for name, child in module.named_children():
                if child is not None and child not in visited:
                    visited.add(child)
                    queue.append((join_fqn(prefix, name), child))
        if by_kind[True] and by_kind[False] and not unit.kwargs.get("use_orig_params", False):
            trained, frozen = (some_of([join_fqn(*each) for each in by_kind[kind]], _MAX_LISTED) for kind in by_kind)
            raise OptionError(
                f"{describe_module(unit.module, unit.fqn)} would be one unit with trainable and frozen parameters, "
                f"which needs use_orig_params=True.\n  requires_grad=True: {trained}\n"
                f"  requires_grad=False: {frozen}\n"
                "Pass use_orig_params=True, or choose a policy that puts them into separate units."
            )


def _warn_of_unmatched(
    root: nn.Module, classes: Sequence[type], ignored_params: set[nn.Parameter], *, has_units: bool
) -> None:
    """Warn if some classes match nothing, or only ignored modules of a model that could be split."""
    kind = type(root).__name__
    unmatched = [cls for cls in classes if not any(isinstance(module, cls) for module in root.modules())]
    if unmatched and (has_units or len(unmatched) == len(classes)):
        found = (
            f"names classes of which {kind} has no module, so they give no units:"
            if has_units
            else f"matches no module of {kind}, so the whole model becomes one unit. The policy names"
        )
        nearest = "\n".join(f"  {_full_name(cls)}: {_nearest(cls, root)}" for cls in sorted(unmatched, key=_full_name))
        warn_user(f"auto_wrap_policy {found}\n{nearest}\nPass the very classes that the model is made of.")
    # A policy that asks for the root gets it, since that is a unit.
    elif not has_units and not isinstance(root, tuple(classes)):
        found = "matches only ignored modules" if classes else "names no class"
        if _could_be_split(root, ignored_params):
            warn_user(f"auto_wrap_policy {found} of {kind}, so all the rest of the model becomes one unit.")


def _could_be_split(root: nn.Module, ignored_params: set[nn.Parameter]) -> bool:
    return sum(not ignored_params.issuperset(each.parameters(recurse=False)) for each in root.modules()) > 1


def _warn_of_one_unit(root: nn.Module, ignored_params: set[nn.Parameter]) -> None:
    """Warn, with the largest modules, that a policy of other criteria than classes has chosen nothing."""
    if not _could_be_split(root, ignored_params):
        return

    def numel_of(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters() if param not in ignored_params)

    sizes = [(numel_of(child), describe_module(child, path)) for path, child in root.named_modules() if path]
    largest = sorted(sizes, key=lambda entry: entry[0], reverse=True)[:_MAX_LISTED]
    described = ", ".join(f"{name} of {counted(numel, 'elements')}" for numel, name in largest if numel)
    warn_user(
        f"auto_wrap_policy chooses no module below {type(root).__name__}, so the whole model becomes one unit of "
        f"{numel_of(root):,} elements. Its largest modules: {described}. Choose some of these, for example by "
        "ModuleWrapPolicy({their class}); or pass auto_wrap_policy=None for one unit."
    )


def _nearest(cls: type, root: nn.Module) -> str:
    """Describe the classes in the tree that ``cls`` may have been meant to be, with counts."""
    counts = Counter(type(module) for module in root.modules())
    by_name: dict[str, list[type]] = {}
    for candidate in counts:
        by_name.setdefault(candidate.__name__.lower(), []).append(candidate)
    names = get_close_matches(cls.__name__.lower(), by_name, n=3, cutoff=0.5)
    near = {_full_name(found): counts[found] for name in names for found in by_name[name]}
    if near:
        return f"nearest in the model: {_counted(near)}"
    common = {_full_name(found): count for found, count in counts.most_common(3)}
    return f"nothing like it in the model, which has mostly {_counted(common)}"


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count} module{'' if count == 1 else 's'})" for name, count in counts.items())


def _post_order(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each module once, children before parents, ``root`` last.

    A module that is registered at several places has the first of its paths, and precedes every module that holds it.
    """
    ordered: list[tuple[str, nn.Module]] = []
    _visit("", root, {root}, ordered)
    return ordered


def _visit(path: str, module: nn.Module, visited: set[nn.Module], ordered: list[tuple[str, nn.Module]]) -> None:
    # No closure: one that calls itself keeps the model alive until the garbage collector runs.
    for name, child in module.named_children():
        if child is not None and child not in visited:
            visited.add(child)
            _visit(join_fqn(path, name), child, visited, ordered)
    ordered.append((path, module))
