"""Tests of released clients run where the packages that a file needs are installed: ``make test-clients``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_CLIENTS = ("accelerate", "transformers", "lightning", "peft", "torchtitan", "torchtnt")
# Those that take the ranks' device, which ``python -m tests.gpu`` runs; the others name the CPU, or one device a rank.
NEEDS = {
    "test_hugging_face.py": ("transformers",),
    "test_loggers.py": ("tensorboard", "wandb"),
    "test_peft.py": ("peft", "transformers"),
    "test_transformers.py": ("accelerate", "transformers"),
    "test_torchtitan.py": ("torchtitan",),
}


def missing(file: str) -> list[str]:
    """Return the packages that a file needs and that are not installed."""
    return [name for name in NEEDS.get(file, _CLIENTS) if not importlib.util.find_spec(name)]


# `make test` has none of them, and needs none.
collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if missing(path.name)]
