"""Defines guards that look at each tree of units once."""

from __future__ import annotations

from weakref import WeakSet

from fsdp_flat.core import Guard, Step


class OnceATree(Guard):
    """Remembers, in ``seen``, the trees that the guard has looked at."""

    def __init__(self) -> None:
        self.seen: WeakSet[Step] = WeakSet()

    def is_first(self, step: Step) -> bool:
        """Return whether the guard has yet to look at a tree, which counts as looked at from now on."""
        if step in self.seen:
            return False
        self.seen.add(step)
        return True
