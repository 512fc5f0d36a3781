"""Defines policies: functions and objects that select the submodules that become units.

A function policy is called with keywords ``module``, ``recurse`` and ``nonwrapped_numel`` while a tree is walked
bottom up. With ``recurse=True`` it returns whether to descend below ``module``; with ``recurse=False`` it returns
whether to wrap it, given that ``nonwrapped_numel`` elements are in no unit yet. A policy object gets the whole tree.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Union, get_args, get_origin, runtime_checkable

from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.wrap.tree import describe_module


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
        if isinstance(module_classes, (str, type)) or not isinstance(module_classes, Iterable):
            raise OptionTypeError(not_a_collection(module_classes, "ModuleWrapPolicy(module_classes)"))
        entries = list(module_classes)
        flatten_classes(entries, "ModuleWrapPolicy(module_classes)")
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


def not_a_collection(value: object, where: str) -> str:
    """Return the error text for ``value`` where a collection of classes is expected."""
    got = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r} ({type(value).__name__})"
    return f"{where} expects a set of nn.Module subclasses, got {got}. Put the classes themselves in a set."


def flatten_classes(entries: Iterable[Any], where: str) -> tuple[type, ...]:
    """Return the classes among ``entries``, with tuples and unions of classes (as isinstance takes) expanded.

    Args:
        entries: the argument of a policy.
        where: the argument's name, for the message.

    Raises:
        OptionTypeError: if an entry is not a class, or a class that no module can be an instance of.
    """
    classes: list[type] = []
    for entry in entries:
        if isinstance(entry, tuple):
            classes += flatten_classes(entry, where)
        elif get_origin(entry) in (Union, types.UnionType):
            classes += flatten_classes(get_args(entry), where)
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
