"""The oldest torch that this library works with, checked before anything else of it is imported."""

from __future__ import annotations

import torch
from packaging.version import Version

__all__ = ["OLDEST", "check_torch"]

# setup.py and README name it too, and `make test-versions` tests it.
OLDEST = "2.8"


def check_torch(version: str) -> None:
    """Refuse a torch that is too old; a pre-release or a build of one's own counts as its release.

    Raises:
        ImportError: it is older than :data:`OLDEST`.
    """
    if Version(version).release < Version(OLDEST).release:
        raise ImportError(
            f"fsdp_flat needs torch {OLDEST} or newer, and this is torch {version} from {torch.__file__}. "
            f"Install a newer one: pip install 'torch>={OLDEST}'."
        )


check_torch(str(torch.__version__))
