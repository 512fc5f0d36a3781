"""Selects the submodules that become units: by policies, functions and objects, or by ``wrap`` as a model is built.

A function policy is called with keywords ``module``, ``recurse`` and ``nonwrapped_numel`` while a tree is walked
bottom up. With ``recurse=True`` it returns whether to descend below ``module``; with ``recurse=False`` it returns
whether to wrap it, given that ``nonwrapped_numel`` elements are in no unit yet. A policy object gets the whole tree.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, Union, get_args, get_origin

from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, UnsupportedError
from fsdp_flat.layout import clean_fqn

# Function policies that decide by class, and the argument that holds the classes. Policies are matched by name, so that
# FSDP1's own functions count too.
_CLASS_ARGUMENT = {
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "_module_wrap_policy": "module_classes",
}


def describe_module(module: nn.Module, path: str) -> str:
    """Return the path and the class of a module, for messages."""
    kind = type(module).__name__
    return f"'{clean_fqn(path)}' ({kind})" if path else f"the root module ({kind})"


class _Policy(ABC):
    """Defines the interface of policy objects: one method that processes a whole tree."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, each with its keyword arguments; the root is never wrapped again."""


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
        module, recurse, nonwrapped_numel: those of every function policy, see :mod:`fsdp_flat.wrap.policies`.
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
        module, recurse, nonwrapped_numel: those of every function policy, see :mod:`fsdp_flat.wrap.policies`.
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
        module, recurse, nonwrapped_numel: those of every function policy, see :mod:`fsdp_flat.wrap.policies`.
        min_num_params: minimum number of elements for a unit.
        force_leaf_modules: classes below which nothing is wrapped; None stands for
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: classes that are not wrapped themselves; None stands for
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.

    Returns:
        Whether to descend below ``module``, or to wrap it.
    """
    if not isinstance(min_num_params, (int, float)):
        raise OptionTypeError(f"size_based_auto_wrap_policy(min_num_params) must be a number; got {min_num_params!r}.")
    defaults: Any = size_based_auto_wrap_policy  # the attributes are read at each call: users change them
    if recurse:
        barred = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        barred = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(barred))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def is_policy_object(policy: Any) -> bool:
    """Return whether a policy gets the whole tree: ours, or an instance of FSDP1's own classes."""
    return hasattr(policy, "_run_policy")


def check_policy(policy: Any) -> None:
    """Raise if ``policy`` is neither a function policy nor a policy object."""
    if isinstance(policy, type):
        raise OptionTypeError(
            f"auto_wrap_policy is the class {policy.__name__}. Pass a policy, for example ModuleWrapPolicy({{Block}})."
        )
    if not callable(policy) and not is_policy_object(policy):
        raise OptionTypeError(
            f"auto_wrap_policy is {policy!r} ({type(policy).__name__}); expected a function of module, recurse and "
            "nonwrapped_numel, or a policy object. To wrap by class, use ModuleWrapPolicy(classes)."
        )


def explain_unbound(policy: Callable[..., bool], error: TypeError) -> None:
    """Raise a better error if ``error`` arose because ``policy`` does not accept the arguments of a policy."""
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
        policies = policy.keywords.get("policies")
        if name == "_or_policy" and isinstance(policies, (list, tuple, set, frozenset)):
            found = [named_classes(each) for each in policies]
            return None if None in found else tuple(dict.fromkeys(chain.from_iterable(filter(None, found))))
        argument = _CLASS_ARGUMENT.get(name, "")
        if argument not in policy.keywords:
            return None
        classes, where = policy.keywords[argument], f"{name}({argument})"
    else:
        # The attribute of ModuleWrapPolicy, FSDP1's included.
        classes = getattr(policy, "_module_classes", None) if is_policy_object(policy) else None
        if classes is None:
            return None
        where = f"{type(policy).__name__}(module_classes)"
    # Reading an iterator would exhaust it.
    return None if isinstance(classes, Iterator) else _flatten_classes(classes, where)


def _flatten_classes(entries: Any, where: str) -> tuple[type, ...]:
    """Return the classes in the argument ``where``, with tuples and unions of classes (as isinstance takes) expanded.

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
        # A class with its own isinstance may match anything.
        elif type(entry).__instancecheck__ is type.__instancecheck__ and not _is_base_of_modules(entry):
            raise OptionTypeError(
                f"{where} holds the class {entry.__module__}.{entry.__qualname__}, which is no subclass of nn.Module "
                "and no base class of one, so it can match nothing. Name the class of the modules to wrap."
            )
        else:
            classes.append(entry)
    return tuple(classes)


def _is_base_of_modules(cls: type) -> bool:
    """Return whether ``cls`` or one of its subclasses is a module class."""
    return issubclass(cls, nn.Module) or any(_is_base_of_modules(below) for below in type.__subclasses__(cls))


# -- while a model is built -------------------------------------------------------------------------------------------


def overrides_of(module: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments in the ``_wrap_overrides`` of ``module``, if any."""
    return dict(getattr(module, "_wrap_overrides", None) or {})


# The class and the arguments of the active enable_wrap. Per thread and per task: two models may be built at once.
_active: ContextVar[tuple[Any, dict[str, Any]] | None] = ContextVar("fsdp_flat_enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Make :func:`wrap` wrap inside this context; outside, ``wrap`` returns its argument.

    ::

        with enable_wrap(wrapper_cls=FSDP, device_id=torch.device("cpu")):
            self.block = wrap(Block())

    The context holds for the current thread (or asyncio task) and ends with an exception too.

    Args:
        wrapper_cls: class (or function) to wrap with, called as ``wrapper_cls(module, **kwargs)``.
        **wrapper_kwargs: keyword arguments of every wrapper made inside.

    Raises:
        UnsupportedError: inside another ``enable_wrap``.
    """
    if (active := _active.get()) is not None:
        raise UnsupportedError(
            "enable_wrap is already active in this thread (wrapper_cls="
            f"{getattr(active[0], '__name__', repr(active[0]))}) and cannot be nested. "
            "Leave the outer context first, or pass other arguments to wrap(module, ...)."
        )
    _active.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _active.set(None)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` if an :func:`enable_wrap` context is active, else return it as it is.

    Args:
        module: the module.
        **wrap_overrides: keyword arguments that override those of the context.

    Returns:
        The wrapped module, or ``module``.

    Raises:
        PhaseError: if the context was given no wrapper (None).
    """
    if (active := _active.get()) is None:
        return module
    wrapper_cls, kwargs = active
    if wrapper_cls is None:
        raise PhaseError(f"No wrapper for {type(module).__name__}: wrapper_cls is None. Pass the class to wrap with.")
    return wrapper_cls(module, **{**kwargs, **wrap_overrides, **overrides_of(module)})
