"""Warns at the line of the caller's code that called into the library."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

# Calls run through torch (modules, the autograd engine) and contextlib (context managers) too. A file's complete path
# does not count as a prefix of it.
_PASSED_OVER = (
    str(Path(__file__).parent) + "/",
    str(Path(torch.__file__).parent) + "/",
    contextlib.__file__.removesuffix("py"),
)


def warn_user(text: str, category: type[Warning] = UserWarning, *, stacklevel: int) -> None:
    """Warn at the innermost line that is neither the library's nor torch's.

    Args:
        text: the warning.
        category: its class.
        stacklevel: as in ``warnings.warn``, from the function that calls this one to the caller's code. Only Python
            3.10 and 3.11 use it, which cannot pass over files; of several ways through the library it fits one.
    """
    if sys.version_info >= (3, 12):
        warnings.warn(text, category, skip_file_prefixes=_PASSED_OVER)
    else:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
