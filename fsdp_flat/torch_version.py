"""Checks the version of torch, before any other module of the library is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from packaging.version import Version

# setup.py and README name it too, and `make test-versions` tests it.
OLDEST = "2.8"


def check_torch(version: str) -> None:
    """Raise if torch is too old; a pre-release or a custom build counts as its release.

    Raises:
        ImportError: it is older than :data:`OLDEST`.
    """
    if Version(version).release < Version(OLDEST).release:
        import torch

        raise ImportError(
            f"fsdp_flat needs torch {OLDEST} or newer, and this is torch {version} from {torch.__file__}. "
            f"Install a newer one: pip install 'torch>={OLDEST}'."
        )


def installed_version() -> str:
    """Return the version of torch, without importing it where its package says: the command's help needs no torch."""
    if "torch" not in sys.modules:
        spec = importlib.util.find_spec("torch")
        try:
            package = importlib.metadata.distribution("torch")
            # Another torch may come first on the path than the one that pip knows.
            if spec is not None and spec.origin == str(package.locate_file("torch/__init__.py")):
                return package.version
        except importlib.metadata.PackageNotFoundError:
            pass
    import torch

    return str(torch.__version__)


check_torch(installed_version())
