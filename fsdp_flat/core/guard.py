"""Defines guards, and turns them on.

A guard finds a mistake of the program: it looks, and it may raise or warn. It changes nothing, and owns no state of the
step: a right program does the same without any guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from fsdp_flat.core.backward import Iteration
from fsdp_flat.core.events import EVENTS, Events
from fsdp_flat.core.forward import UnitForward
from fsdp_flat.core.memory import WeightsVersion
from fsdp_flat.core.step import Step
from fsdp_flat.core.unit import Unit


class Guard:
    """Is told of events; a subclass defines those that it needs. Every rank is told of the same events of a step."""

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Look at a tree of units: an iteration, an outermost forward, begins."""

    def before_reuse(self, unit: Unit) -> None:
        """Look at a unit whose unsharded parameters are used again, or whose shards are read while it has them."""

    def after_compute(self, forward: UnitForward) -> None:
        """Look at what a module has computed, while its parameters are unsharded."""

    def before_backward(self, unit: Unit, weights: WeightsVersion, current: WeightsVersion) -> None:
        """Look at a unit whose backward begins: of a forward with ``weights``, while it holds ``current`` ones."""

    def after_reduce(self, step: Step) -> None:
        """Look at a tree whose reduced gradients are set."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer of units' parameters before its first step, and before the first with other ones.

        It holds parameters of units, or parameters that units or ``unwrap`` have replaced. The event comes again before
        the next step after the optimizer got other parameters or loaded a state dict, or a unit was built or unwrapped.
        Ranks may step different optimizers.
        """

    def step_raised(self, step: Step, error: BaseException) -> None:
        """Look at an error that leaves a forward or a backward, before what the step holds is freed.

        It comes for each unit that the error passes. It may get a note.
        """


_on: Sequence[Guard] = ()


def use_guards(guards: Sequence[Guard]) -> Sequence[Guard]:
    """Tell ``guards`` of events from now on, in this order, in place of those before, which are returned."""
    global _on
    before, _on = _on, tuple(guards)
    for event in fields(Events):
        own = [each for each in _on if getattr(type(each), event.name) is not getattr(Guard, event.name)]
        setattr(EVENTS, event.name, tuple(getattr(each, event.name) for each in own))
    return before


def guards_in_use() -> Sequence[Guard]:
    """Return the guards that are told of events."""
    return _on
