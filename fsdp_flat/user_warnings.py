"""Warns at the line of the caller's code that called into the library."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

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
