"""Tells guards of the events of a step.

A guard keeps a promise that the step itself does not: it finds a mistake, or keeps a kind of program right. It may
raise, and owns no state of the step. The step runs without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_flat.runtime.backward import Iteration
    from fsdp_flat.runtime.forward import UnitForward
    from fsdp_flat.runtime.memory import WeightsVersion
    from fsdp_flat.runtime.step import Step
    from fsdp_flat.runtime.unit import Unit


class Guard:
    """Is told of events; a subclass defines those that it needs. Every rank is told of the same events."""

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Look at a tree of units: an iteration, an outermost forward, begins."""

    def before_gather(self, unit: Unit) -> None:
        """Look at the shards of a unit: they are read next, or its unsharded parameters used again."""

    def after_compute(self, forward: UnitForward) -> None:
        """Look at what a module has computed, while its parameters are unsharded."""

    def before_backward(self, unit: Unit, weights: WeightsVersion, current: WeightsVersion) -> None:
        """Look at a unit whose backward begins: of a forward with ``weights``, while it holds ``current`` ones."""

    def after_reduce(self, step: Step) -> None:
        """Look at a tree whose reduced gradients are set."""


class Events:
    """Holds for each event what the guards that are on do, in their order."""

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()
        self.tree_built: tuple[Callable[[Step, Iteration], None], ...] = ()
        self.before_gather: tuple[Callable[[Unit], None], ...] = ()
        self.after_compute: tuple[Callable[[UnitForward], None], ...] = ()
        self.before_backward: tuple[Callable[[Unit, WeightsVersion, WeightsVersion], None], ...] = ()
        self.after_reduce: tuple[Callable[[Step], None], ...] = ()

    def use(self, guards: Iterable[Guard]) -> tuple[Guard, ...]:
        """Tell ``guards`` of events from now on, in place of those before, which are returned."""
        before, self.guards = self.guards, tuple(guards)
        for name in ("tree_built", "before_gather", "after_compute", "before_backward", "after_reduce"):
            setattr(self, name, tuple(self._told(name)))
        return before

    def _told(self, name: str) -> Iterable[Callable[..., Any]]:
        for guard in self.guards:
            if getattr(type(guard), name) is not getattr(Guard, name):
                yield getattr(guard, name)


# The events of every tree in the process.
EVENTS = Events()
