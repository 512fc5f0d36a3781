"""Checks policies for mistakes before anything is wrapped, and warns about likely ones."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, some_of
from fsdp_flat.layout import join_fqn
from fsdp_flat.user_warnings import warn_user
from fsdp_flat.wrap.policies import PolicyObject, flatten_classes, not_a_collection
from fsdp_flat.wrap.tree import describe_module, named_children

_MAX_LISTED = 8

# Function policies that decide by class, and the argument that holds the classes. Policies are matched by name, so that
# FSDP1's own functions count too.
_CLASS_ARGUMENT = {
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "_module_wrap_policy": "module_classes",
}


def check_policy(policy: Any) -> None:
    """Check that ``policy`` is a function policy or a policy object.

    Raises:
        PhaseError: if it is None.
        OptionTypeError: if it is a class, or neither callable nor a policy object.
    """
    if policy is None:
        raise PhaseError("auto_wrap_policy is None. Pass a policy, or do not plan units.")
    if isinstance(policy, type):
        raise OptionTypeError(
            f"auto_wrap_policy is the class {policy.__name__}. Pass a policy, for example ModuleWrapPolicy({{Block}})."
        )
    if not callable(policy) and not isinstance(policy, PolicyObject):
        raise OptionTypeError(
            f"auto_wrap_policy is {policy!r} ({type(policy).__name__}); expected a function of module, recurse and "
            "nonwrapped_numel, or a policy object. To wrap by class, use ModuleWrapPolicy(classes)."
        )


def explain_unbound(policy: Callable[..., bool], error: TypeError) -> None:
    """Raise a better error if ``error`` arose because ``policy`` does not accept the arguments of a policy.

    Raises:
        OptionTypeError: in that case; otherwise nothing is raised.
    """
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as mismatch:
        function = policy.func if isinstance(policy, functools.partial) else policy
        name = getattr(function, "__name__", repr(function))
        raise OptionTypeError(
            f"auto_wrap_policy {name}{signature} cannot be called with keywords module, recurse and nonwrapped_numel: "
            f"{mismatch}. Bind every other argument with functools.partial({name}, ...)."
        ) from error


def raise_wrapped(root: nn.Module, is_wrapped: Callable[[nn.Module], bool]) -> NoReturn:
    """Raise the error for a tree in which a module is already a unit.

    Raises:
        OptionError: naming the first one that is.
    """
    path, module = next((path, module) for path, module in root.named_modules() if is_wrapped(module))
    raise OptionError(
        f"auto_wrap_policy cannot be used on {type(root).__name__}: {describe_module(module, path)} is wrapped "
        "already. Wrap either by hand (and pass no policy for the root) or by policy."
    )


def check_uniform_requires_grad(
    units: Iterable[tuple[str, nn.Module, dict[str, Any]]], ignored_params: set[nn.Parameter]
) -> None:
    """Check that each unit without original parameters is entirely frozen or entirely trainable.

    Args:
        units: (path, module, keyword arguments), children before parents.
        ignored_params: parameters that no unit manages.

    Raises:
        OptionError: naming the first mixed unit, and its parameters of both kinds.
    """
    visited: set[nn.Module] = set()
    for path, unit, kwargs in units:
        by_kind: dict[bool, list[str]] = {True: [], False: []}
        visited.add(unit)
        queue = [(path, unit)]
        for prefix, module in queue:
            for name, param in module._parameters.items():
                if param is not None and param not in ignored_params:
                    by_kind[param.requires_grad].append(join_fqn(prefix, name))
            for name, child in named_children(module):
                if child not in visited:
                    visited.add(child)
                    queue.append((join_fqn(prefix, name), child))
        if by_kind[True] and by_kind[False] and not kwargs.get("use_orig_params", False):
            raise OptionError(
                f"{describe_module(unit, path)} would be one unit with trainable and frozen parameters, which needs "
                f"use_orig_params=True.\n  requires_grad=True: {some_of(by_kind[True], _MAX_LISTED)}\n"
                f"  requires_grad=False: {some_of(by_kind[False], _MAX_LISTED)}\n"
                "Pass use_orig_params=True, or choose a policy that puts them into separate units."
            )


def named_classes(policy: Any) -> tuple[type, ...] | None:
    """Return the classes by which ``policy`` decides; None if it has other criteria as well.

    Raises:
        OptionTypeError: if they are not classes that a module can be an instance of.
    """
    if isinstance(policy, functools.partial):
        name = getattr(policy.func, "__name__", "")
        if name == "_or_policy":
            return _classes_of_all(policy.keywords.get("policies"))
        argument = _CLASS_ARGUMENT.get(name, "")
        return _classes_in(policy.keywords[argument], f"{name}({argument})") if argument in policy.keywords else None
    if isinstance(policy, PolicyObject):
        # The attribute of ModuleWrapPolicy, FSDP1's included.
        classes = getattr(policy, "_module_classes", None)
        return None if classes is None else _classes_in(classes, f"{type(policy).__name__}(module_classes)")
    return None


def _classes_of_all(policies: Any) -> tuple[type, ...] | None:
    """Return the classes of all policies; None if one of them has other criteria."""
    if not isinstance(policies, (list, tuple, set, frozenset)):
        return None
    found: list[type] = []
    for policy in policies:
        classes = named_classes(policy)
        if classes is None:
            return None
        found += classes
    return tuple(dict.fromkeys(found))


def _classes_in(value: Any, where: str) -> tuple[type, ...] | None:
    """Return the classes in an argument; None for an iterator, which reading would exhaust."""
    if isinstance(value, (str, type)) or not isinstance(value, Iterable):
        raise OptionTypeError(not_a_collection(value, where))
    return None if iter(value) is value else flatten_classes(value, where)


def warn_full_precision(root: nn.Module, modules: Sequence[nn.Module], *, stacklevel: int) -> None:
    """Warn if some modules keep full precision under mixed precision and a policy."""
    if modules:
        counts = Counter(type(module).__name__ for module in modules)
        warn_user(
            f"mixed_precision and auto_wrap_policy are both given for {type(root).__name__}, which has modules that "
            f"stay in full precision: {_counted(counts)}. Each becomes a unit of its own with mixed_precision=None. "
            "To run them in low precision too, pass MixedPrecision(..., _module_classes_to_ignore=()).",
            stacklevel=stacklevel,
        )


def warn_no_match(
    root: nn.Module, classes: Sequence[type], ignored_params: set[nn.Parameter], *, stacklevel: int
) -> None:
    """Warn if a policy by class selected no units but was likely meant to.

    This is likely if the classes match nothing at all, or only ignored modules of a model that could be split.
    """
    kind = type(root).__name__
    if not any(isinstance(module, tuple(classes)) for module in root.modules()):
        if classes:
            nearest = "\n".join(
                f"  {_full_name(cls)}: {_nearest(cls, root)}" for cls in sorted(classes, key=_full_name)
            )
            warn_user(
                f"auto_wrap_policy matches no module of {kind}, so the whole model becomes one unit. The policy names\n"
                f"{nearest}\nPass the very classes that the model is made of.",
                stacklevel=stacklevel,
            )
            return
    elif isinstance(root, tuple(classes)):
        return  # the policy asks for the root, which is a unit
    num_with_params = sum(
        any(param not in ignored_params for param in module.parameters(recurse=False)) for module in root.modules()
    )
    if num_with_params > 1:
        what = "matches only ignored modules" if classes else "names no class"
        warn_user(
            f"auto_wrap_policy {what} of {kind}, so all the rest of the model becomes one unit.", stacklevel=stacklevel
        )


def warn_unmatched(root: nn.Module, classes: Sequence[type], *, stacklevel: int) -> None:
    """Warn if some of the classes that a policy names match nothing, while others do."""
    unmatched = [cls for cls in classes if not any(isinstance(module, cls) for module in root.modules())]
    if unmatched:
        nearest = "\n".join(f"  {_full_name(cls)}: {_nearest(cls, root)}" for cls in sorted(unmatched, key=_full_name))
        warn_user(
            f"auto_wrap_policy names classes of which {type(root).__name__} has no module, so they give no units:\n"
            f"{nearest}\nPass the very classes that the model is made of.",
            stacklevel=stacklevel,
        )


def warn_no_forward(module: nn.Module, name: str) -> None:
    """Warn if ``module`` is a container that is never called, so that its own parameters are never unsharded."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        warn_user(
            f"Unit {name!r} wraps a {type(module).__name__}, which has no forward, so its own parameters are never "
            "gathered. Wrap its entries, or the module that calls them.",
            stacklevel=5,
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
