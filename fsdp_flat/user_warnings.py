"""Warns at the line of the caller's code that called into the library, also of a block that it did not enter."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Calls run through torch (modules, the autograd engine) and contextlib (context managers) too.
_PASSED_OVER = (str(Path(__file__).parent) + "/", str(Path(torch.__file__).parent) + "/", contextlib.__file__)


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither the library's nor torch's; else at the outermost line.

    Args:
        text: the warning.
        category: its class.
    """
    # warnings.warn(skip_file_prefixes=...) does the same, from Python 3.12.
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def entered(function: Callable[_P, AbstractContextManager[_T]]) -> Callable[_P, AbstractContextManager[_T]]:
    """Have a function that returns a context manager warn if its caller drops it without entering it."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
        return _Block(function.__name__, functools.partial(function, *args, **kwargs))

    return call


class _Block(ContextDecorator, AbstractContextManager[Any]):
    """Enters contexts that ``make`` makes; a block that nobody has entered says so when it is dropped."""

    def __init__(self, name: str, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._name, self._make, self._is_used = name, make, False
        self._entered = list[AbstractContextManager[Any]]()

    def __enter__(self) -> Any:
        self._is_used = True
        self._entered.append(self._make())
        return self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def __call__(self, function: Any) -> Any:
        self._is_used = True
        return super().__call__(function)

    def __del__(self) -> None:
        if not self._is_used:
            warn_user(
                f"{self._name} was called and not entered, so it has done nothing. Make it a block around the code "
                f"that needs it: with {self._name}(...):"
            )
