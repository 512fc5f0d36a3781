"""One backward of a tree: a walk through the events of its iterations, from the last one to the first.

Autograd comes back through a graph in the reverse order of its making. When the gradients of the inputs of a forward
are there, everything that was recorded after that forward began is over. So a backward is a cursor on the events of
the iterations that it goes through, which falls from the last event to the first:

* at the end of a unit's forward, its parameters are gathered;
* at the begin of a unit's first forward with gradients, its turn has come: the parameters are freed and the gradient
  is reduced.

Each rank passes every event, also those of units that its own loss does not reach: it joins their all-gathers and adds
zeros to their gradients. Therefore the order of collectives is a function of the forwards alone, the same on all
ranks. Gradients that come later than the turn of their unit, or without any forward of it, are reduced at the end of
the backward (see ``exchange``).

Every rank's backward has to go through the same iterations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_flat.runtime.records import Event, ForwardRecord, Iteration
from fsdp_flat.runtime.unit import Unit, Weights

__all__ = ["Backward"]


class Backward:
    """A backward of one tree, made where autograd first gets to the tree and dropped at its end.

    Args:
        join: begins to gather a unit at the end of its forward, whether this rank needs it or not.
        take_turn: ends a unit's part: frees its parameters and reduces its gradient.

    Attributes:
        iterations: those that it goes through.
        keeps_graph: it records a graph of its own (``create_graph=True``).
    """

    def __init__(self, join: Callable[[Unit, Weights], None], take_turn: Callable[[Unit], None]) -> None:
        self.keeps_graph = torch.is_grad_enabled()
        self._join = join
        self._take_turn = take_turn
        self.iterations: set[Iteration] = set()
        # Events that are still to be passed, the next one last; and where the turn of each unit comes.
        self._events: list[Event] = []
        self._turns: dict[Unit, int] = {}
        self._returning: set[Unit] = set()

    def include(self, iterations: list[Iteration]) -> None:
        """Adds iterations whose events the backward is to pass."""
        if self.iterations.issuperset(iterations):
            return
        new = [iteration for iteration in iterations if iteration not in self.iterations]
        self.iterations.update(new)
        self._events.extend([event for iteration in new for event in iteration.events])
        if len(self.iterations) > 1:
            self._events.sort(key=_position)
        turns: dict[Unit, int] = {}
        # Forwards without gradients count for units that have no others: those of re-entrant checkpoints.
        self._returning.update([event.unit for event in self._events if event.in_grad])
        for in_grad in (True, False):
            for event in self._events:
                if event.is_begin and event.in_grad is in_grad and (in_grad or event.unit not in self._returning):
                    turns.setdefault(event.unit, event.position)
        self._turns = turns

    def reach(self, record: ForwardRecord) -> None:
        """Passes everything that came after the forward of ``record``; its outputs' gradients are there."""
        self._pass_until(record.end)
        if self._events and self._events[-1].position == record.end:
            self._events.pop()

    def complete(self, record: ForwardRecord) -> None:
        """Passes the begin of the forward of ``record`` too; its inputs' gradients are there."""
        if record.iteration in self.iterations:
            self._pass_until(record.begin - 1)
        elif record.iteration is None:
            self._complete_recomputed(record.unit)

    def _complete_recomputed(self, unit: Unit) -> None:
        """A forward that a re-entrant checkpoint has recomputed is over.

        It stands for one of the unit's forwards in the events, none of which is later than the last one that was not
        passed. So everything after that one is over.
        """
        for event in reversed(self._events):
            if event.is_begin and event.unit is unit:
                self._pass_until(event.position - 1)
                return

    def finish(self) -> None:
        """Passes everything that is left."""
        self._pass_until(-1)

    def _pass_until(self, position: int) -> None:
        events = self._events
        while events and events[-1].position > position:
            event = events.pop()
            if not event.is_begin:
                if event.weights is not None and self._comes_back(event):
                    self._join(event.unit, event.weights)
            elif self._turns.get(event.unit) == event.position:
                self._take_turn(event.unit)

    def _comes_back(self, event: Event) -> bool:
        return event.in_grad or event.unit not in self._returning

    def next_to_gather(self, after: Unit) -> Unit | None:
        """The unit whose gathering comes next, other than ``after``; None if there is none."""
        for event in reversed(self._events):
            if event.weights is not None and event.unit is not after and event.unit.gathers and self._comes_back(event):
                return event.unit
        return None


def _position(event: Event) -> int:
    return event.position
