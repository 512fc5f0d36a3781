"""The released clients run in an environment of their own: ``make test-clients``."""

from __future__ import annotations

import importlib.util

_CLIENTS = ("accelerate", "transformers", "lightning", "peft", "torchtitan", "torchtnt")
# `make test` has none of them, and needs none.
collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in _CLIENTS) else ["test_*.py"]
