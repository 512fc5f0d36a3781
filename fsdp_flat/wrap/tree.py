"""Walks module trees, and wraps modules of them: wherever they are registered, or while a model is built."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from fsdp_flat.errors import PhaseError, UnsupportedError
from fsdp_flat.layout import clean_fqn, join_fqn

# Each module of a tree, with every (parent, name) that it is registered at.
Places = dict[nn.Module, list[tuple[nn.Module, str]]]


def describe_module(module: nn.Module, path: str) -> str:
    """Return the path and the class of a module, for messages."""
    kind = type(module).__name__
    return f"'{clean_fqn(path)}' ({kind})" if path else f"the root module ({kind})"


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of ``module``, each once and under its first name."""
    for name, child in module.named_children():
        if child is not None:  # only where a class overrides named_children
            yield name, child


def post_order(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each module once, children before parents, ``root`` last.

    A module that is registered at several places has the first of its paths, and precedes every module that holds it.
    """
    ordered: list[tuple[str, nn.Module]] = []
    visited = {root}

    def visit(path: str, module: nn.Module) -> None:
        for name, child in named_children(module):
            if child not in visited:
                visited.add(child)
                visit(join_fqn(path, name), child)
        ordered.append((path, module))

    visit("", root)
    return ordered


def find_places(root: nn.Module) -> Places:
    """Return the places of the modules below ``root``."""
    places: Places = {}
    for parent in root.modules():
        # named_children() hides a second name of the same child, so the dictionary itself is read.
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    return places


def replace_module(places: Places, module: nn.Module, wrapped: object, where: str) -> None:
    """Register ``wrapped`` wherever ``module`` was registered when its places were found."""
    for parent, name in places[module]:
        setattr(parent, name, require_module(wrapped, where))


def require_module(value: object, where: str) -> nn.Module:
    """Return ``value`` if it is a module.

    Raises:
        PhaseError: if it is not (an ``AssertionError`` in FSDP1).
    """
    if not isinstance(value, nn.Module):
        raise PhaseError(f"Wrapping {where} gave {value!r}; the wrapper has to return an nn.Module.")
    return value


def _post_order_apply(root_module: nn.Module, fn: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``fn`` on every module, children first; its result replaces the module at all its places.

    Args:
        root_module: the tree; the root itself cannot be replaced.
        fn: returns the replacement, or None to leave the module as it is.

    Raises:
        PhaseError: if ``fn`` returns a replacement for the root, or neither None nor a module.
    """
    places = find_places(root_module)
    for path, module in post_order(root_module):
        replacement = fn(module)
        if replacement is None:
            continue
        if module is root_module:
            raise PhaseError(
                f"The function returned {type(replacement).__name__} for {describe_module(module, path)}, which has no "
                "parent to register it with. Return None for the root and wrap it yourself."
            )
        replace_module(places, module, replacement, describe_module(module, path))


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


def wrap_overrides(module: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments in the ``_wrap_overrides`` of ``module``, if any."""
    return dict(getattr(module, "_wrap_overrides", None) or {})


def _wrap(module: nn.Module, wrapper_cls: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """Return ``wrapper_cls(module, **kwargs)``; a ``_wrap_overrides`` dict on the module takes priority.

    Raises:
        PhaseError: if ``wrapper_cls`` is None.
    """
    if wrapper_cls is None:
        raise PhaseError(f"No wrapper for {type(module).__name__}: wrapper_cls is None. Pass the class to wrap with.")
    return wrapper_cls(module, **{**kwargs, **wrap_overrides(module)})


# -- while a model is built ------------------------------------------------------------------------------------------

# The arguments of the active enable_wrap. Per thread and per task, so that two models may be built at once.
_active: ContextVar[dict[str, Any] | None] = ContextVar("fsdp_flat_enable_wrap", default=None)


def _without_class(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "wrapper_cls"}


class _Readable(type):
    """Gives :class:`_ConfigAutoWrap` the class attributes that code written for FSDP1 reads."""

    @property
    def in_autowrap_context(cls) -> bool:
        return _active.get() is not None

    @property
    def wrapper_cls(cls) -> Callable[..., nn.Module] | None:
        return (_active.get() or {}).get("wrapper_cls")

    @property
    def kwargs(cls) -> dict[str, Any]:
        return _without_class(_active.get() or {})


class _ConfigAutoWrap(metaclass=_Readable):
    """Implements the context of :func:`enable_wrap`; its class attributes show the current state.

    ``_ConfigAutoWrap.in_autowrap_context``, ``.wrapper_cls`` and ``.kwargs`` are read-only.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    @staticmethod
    def enable_autowrap_context(kwargs: Any) -> None:
        """Begin wrapping with ``kwargs["wrapper_cls"]`` and the other entries.

        Raises:
            UnsupportedError: inside another context.
            PhaseError: without a ``wrapper_cls`` entry.
        """
        current = _active.get()
        if current is not None:
            wrapper_cls = current["wrapper_cls"]
            raise UnsupportedError(
                "enable_wrap is already active in this thread (wrapper_cls="
                f"{getattr(wrapper_cls, '__name__', repr(wrapper_cls))}) and cannot be nested. "
                "Leave the outer context first, or pass other arguments to wrap(module, ...)."
            )
        if "wrapper_cls" not in kwargs:
            raise PhaseError(f"enable_wrap needs wrapper_cls, the class to wrap with; got {sorted(kwargs)}.")
        _active.set(dict(kwargs))

    @staticmethod
    def disable_autowrap_context() -> None:
        """Stop wrapping."""
        _active.set(None)

    def __enter__(self) -> None:
        self.enable_autowrap_context(self.kwargs)

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self.disable_autowrap_context()


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
    with _ConfigAutoWrap(wrapper_cls=wrapper_cls, **wrapper_kwargs):
        yield


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
    arguments = _active.get()
    if arguments is None:
        return module
    wrapper_cls = arguments["wrapper_cls"]
    if wrapper_cls is None:
        raise PhaseError(f"Cannot wrap {type(module).__name__}: enable_wrap was given wrapper_cls=None.")
    return _wrap(module, wrapper_cls, **{**_without_class(arguments), **wrap_overrides})
