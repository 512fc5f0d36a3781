"""Defines policies, functions and objects that select the submodules that become units, and checks given ones.

A function policy is called with keywords ``module``, ``recurse`` and ``nonwrapped_numel`` while a tree is walked
bottom up. With ``recurse=True`` it returns whether to descend below ``module``; with ``recurse=False`` it returns
whether to wrap it, given that ``nonwrapped_numel`` elements are in no unit yet. A policy object gets the whole tree.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Union, get_args, get_origin, runtime_checkable

from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError
from fsdp_flat.wrap.tree import describe_module

# Function policies that decide by class, and the argument that holds the classes. Policies are matched by name, so that
# FSDP1's own functions count too.
_CLASS_ARGUMENT = {
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "_module_wrap_policy": "module_classes",
}


@runtime_checkable
class PolicyObject(Protocol):
    """Matches policy objects: ours, and instances of FSDP1's own classes."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]: ...


class _Policy(ABC):
    """Defines the interface of policy objects: one method that processes a whole tree."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, each with the keyword arguments of its wrapper.

        Args:
            root_module: the tree; the root may be in the result and is not wrapped again.
            ignored_modules: modules that must not be wrapped.
            root_kwargs: the root's own keyword arguments.
        """


class ModuleWrapPolicy(_Policy):
    """Wraps every module of the given classes, with the root's keyword arguments.

    Also callable, as a function policy.

    Args:
        module_classes: subclasses of ``nn.Module`` (or mixins of such).

    Raises:
        OptionTypeError: if it is not a collection, or an entry is not a class that a module can be an instance of.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        entries = list(module_classes) if isinstance(module_classes, Iterator) else module_classes
        _flatten_classes(entries, "ModuleWrapPolicy(module_classes)")
        self._module_classes: set[type[nn.Module]] = set(entries)
        self._module_classes_str = str(self._module_classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return _module_wrap_policy(module, recurse, nonwrapped_numel=-1, module_classes=self._module_classes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module_classes_str})"


class CustomPolicy(_Policy):
    """Wraps the modules that a function selects.

    Args:
        lambda_fn: takes a module; returns False or an empty dict to leave it, True to wrap it with the root's keyword
            arguments, or a dict of keyword arguments that override the root's.

    Raises:
        OptionTypeError: if ``lambda_fn`` cannot be called.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise OptionTypeError(
                f"CustomPolicy expects a function of one module, got {lambda_fn!r} ({type(lambda_fn).__name__})."
            )
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        targets: dict[nn.Module, dict[str, Any]] = {}
        for path, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                hint = " (is a return missing?)" if answer is None else ""
                raise OptionError(
                    f"The function given to CustomPolicy returned {answer!r} for {describe_module(module, path)}"
                    f"{hint}; expected True, False or a dict of keyword arguments."
                )
            if answer:
                targets[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return targets


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every submodule: always return True."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which ``lambda_fn(module)`` is true; bind it with ``functools.partial``.

    Args:
        module: the module to decide about.
        recurse: True asks whether to descend below ``module``; the answer is always True.
        nonwrapped_numel: not used.
        lambda_fn: decides about one module.

    Returns:
        Whether to descend below ``module``, or to wrap it.
    """
    return True if recurse else lambda_fn(module)


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: set[type[nn.Module]]
) -> bool:
    """Wrap instances of ``module_classes``; the function form of :class:`ModuleWrapPolicy`."""
    return True if recurse else isinstance(module, tuple(module_classes))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wrap instances of ``transformer_layer_cls``; bind it with ``functools.partial``.

    Embeddings that share a weight stay together in the root's unit, unless their classes are named.

    Args:
        module: the module to decide about.
        recurse: True asks whether to descend below ``module``; the answer is always True.
        nonwrapped_numel: not used.
        transformer_layer_cls: the classes.

    Returns:
        Whether to descend below ``module``, or to wrap it.
    """
    return _module_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls)


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """Wrap instances of ``module_classes``; added to a policy for the classes that mixed precision excludes."""
    return True if recurse else isinstance(module, tuple(module_classes))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Return True if any of ``policies`` does; later ones are not called after the first True."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module once enough elements below it are in no unit yet.

    Args:
        module: the module to decide about.
        recurse: True asks whether to descend below ``module``, False whether to wrap it.
        nonwrapped_numel: elements of ``module`` that are in no unit yet.
        min_num_params: minimum number of elements for a unit.
        force_leaf_modules: classes below which nothing is wrapped; None stands for
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: classes that are not wrapped themselves; None stands for
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.

    Returns:
        Whether to descend below ``module``, or to wrap it.
    """
    defaults: Any = size_based_auto_wrap_policy  # the attributes are read at each call: users change them
    if recurse:
        barred = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        barred = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(barred))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


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
        if argument not in policy.keywords:
            return None
        classes, where = policy.keywords[argument], f"{name}({argument})"
    else:
        # The attribute of ModuleWrapPolicy, FSDP1's included.
        classes = getattr(policy, "_module_classes", None) if isinstance(policy, PolicyObject) else None
        if classes is None:
            return None
        where = f"{type(policy).__name__}(module_classes)"
    # Reading an iterator would exhaust it.
    return None if isinstance(classes, Iterator) else _flatten_classes(classes, where)


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


def _flatten_classes(entries: Any, where: str) -> tuple[type, ...]:
    """Return the classes among ``entries``, with tuples and unions of classes (as isinstance takes) expanded.

    Args:
        entries: the argument of a policy.
        where: the argument's name, for the message.

    Raises:
        OptionTypeError: if it is no collection, or an entry is not a class that a module can be an instance of.
    """
    if isinstance(entries, (str, type)) or not isinstance(entries, Iterable):
        got = (
            f"the class {entries.__name__}" if isinstance(entries, type) else f"{entries!r} ({type(entries).__name__})"
        )
        raise OptionTypeError(
            f"{where} expects a set of nn.Module subclasses, got {got}. Put the classes themselves in a set."
        )
    classes: list[type] = []
    for entry in entries:
        if isinstance(entry, tuple):
            classes += _flatten_classes(entry, where)
        elif get_origin(entry) in (Union, types.UnionType):
            classes += _flatten_classes(get_args(entry), where)
        elif not isinstance(entry, type):
            kind = "a module, not its class" if isinstance(entry, nn.Module) else f"of type {type(entry).__name__}"
            raise OptionTypeError(
                f"{where} holds {entry!r}, which is {kind}; expected nn.Module subclasses. "
                "Name classes by the class object, imported from the module that the model uses."
            )
        elif not _may_have_module_instances(entry):
            raise OptionTypeError(
                f"{where} holds the class {entry.__module__}.{entry.__qualname__}, which is no subclass of nn.Module "
                "and no base class of one, so it can match nothing. Name the class of the modules to wrap."
            )
        else:
            classes.append(entry)
    return tuple(classes)


def _may_have_module_instances(cls: type) -> bool:
    """Return whether a module can be an instance: of a module class, a mixin, or a class with its own isinstance."""
    return type(cls).__instancecheck__ is not type.__instancecheck__ or _is_base_of_modules(cls)


def _is_base_of_modules(cls: type) -> bool:
    """Return whether ``cls`` or one of its subclasses is a module class."""
    return issubclass(cls, nn.Module) or any(_is_base_of_modules(below) for below in type.__subclasses__(cls))
