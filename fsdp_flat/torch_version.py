"""Checks the version of torch, before any other module of the library is imported."""

from __future__ import annotations

import torch
from packaging.version import Version

# setup.py and README name it too, and `make test-versions` tests it.
OLDEST = "2.8"


def check_torch(version: str) -> None:
    """Raise if torch is too old; a pre-release or a custom build counts as its release.

    Raises:
        ImportError: it is older than :data:`OLDEST`.
    """
    if Version(version).release < Version(OLDEST).release:
        raise ImportError(
            f"fsdp_flat needs torch {OLDEST} or newer, and this is torch {version} from {torch.__file__}. "
            f"Install a newer one: pip install 'torch>={OLDEST}'."
        )


check_torch(str(torch.__version__))
