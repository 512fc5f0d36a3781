"""Wraps by annotation while a model is built, with ``enable_wrap`` and ``wrap``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_flat.errors import PhaseError, UnsupportedError
from fsdp_flat.wrap.tree import _wrap


@dataclass(frozen=True, slots=True)
class _Settings:
    """Holds the arguments of the innermost (and only) ``enable_wrap``."""

    wrapper_cls: Callable[..., nn.Module] | None
    kwargs: dict[str, Any]


# Per thread and per task, so that two models may be built at once.
_active: ContextVar[_Settings | None] = ContextVar("fsdp_flat_enable_wrap", default=None)


class _Readable(type):
    """Gives :class:`_ConfigAutoWrap` the class attributes that code written for FSDP1 reads."""

    @property
    def in_autowrap_context(cls) -> bool:
        return _active.get() is not None

    @property
    def wrapper_cls(cls) -> Callable[..., nn.Module] | None:
        settings = _active.get()
        return None if settings is None else settings.wrapper_cls

    @property
    def kwargs(cls) -> dict[str, Any]:
        settings = _active.get()
        return {} if settings is None else dict(settings.kwargs)


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
            name = getattr(current.wrapper_cls, "__name__", repr(current.wrapper_cls))
            raise UnsupportedError(
                f"enable_wrap is already active in this thread (wrapper_cls={name}) and cannot be nested. "
                "Leave the outer context first, or pass other arguments to wrap(module, ...)."
            )
        if "wrapper_cls" not in kwargs:
            raise PhaseError(f"enable_wrap needs wrapper_cls, the class to wrap with; got {sorted(kwargs)}.")
        rest = {name: value for name, value in kwargs.items() if name != "wrapper_cls"}
        _active.set(_Settings(kwargs["wrapper_cls"], rest))

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
    settings = _active.get()
    if settings is None:
        return module
    if settings.wrapper_cls is None:
        raise PhaseError(f"Cannot wrap {type(module).__name__}: enable_wrap was given wrapper_cls=None.")
    return _wrap(module, settings.wrapper_cls, **{**settings.kwargs, **wrap_overrides})
