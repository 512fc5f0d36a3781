"""Runs one backward of a tree through the recorded events of its iterations, from the last to the first.

Autograd traverses a graph in the reverse order of its construction. Once the gradients of a forward's inputs exist,
autograd has passed everything recorded after that forward began. A backward is therefore a cursor over the events of
its iterations, which moves from the last event to the first:

* at the end of a unit's forward, the unit's parameters are unsharded;
* at the begin of a unit's first forward with gradients, the unit's post-backward runs: its parameters are resharded
  and its gradient is reduced.

Every rank passes every event, including those of units that its own loss does not use: it joins their all-gathers and
adds zeros to their gradients. The order of collectives therefore depends on the forwards alone and is the same on all
ranks. Gradients that appear after their unit's post-backward, or without a forward of the unit, are reduced at the end
of the backward (see ``exchange``).

The backward of every rank must go through the same iterations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_flat.runtime.records import Event, ForwardRecord, Iteration
from fsdp_flat.runtime.unit import Unit, Weights

__all__ = ["Backward"]


class Backward:
    """Tracks one backward of a tree, from the point where autograd first reaches the tree to the end.

    Args:
        join: begins the all-gather of a unit at the end of its forward, whether or not this rank needs the unit.
        take_turn: runs a unit's post-backward: reshards its parameters and reduces its gradient.

    Attributes:
        iterations: the iterations that the backward goes through.
        keeps_graph: the backward records a graph (``create_graph=True``).
    """

    def __init__(self, join: Callable[[Unit, Weights], None], take_turn: Callable[[Unit], None]) -> None:
        self.keeps_graph = torch.is_grad_enabled()
        self._join = join
        self._take_turn = take_turn
        self.iterations: set[Iteration] = set()
        # Events not passed yet, the next one last; and the position of each unit's post-backward.
        self._events: list[Event] = []
        self._turns: dict[Unit, int] = {}
        self._returning: set[Unit] = set()

    def include(self, iterations: list[Iteration]) -> None:
        """Add iterations whose events the backward must pass."""
        if self.iterations.issuperset(iterations):
            return
        new = [iteration for iteration in iterations if iteration not in self.iterations]
        self.iterations.update(new)
        self._events.extend([event for iteration in new for event in iteration.events])
        if len(self.iterations) > 1:
            self._events.sort(key=_position)
        turns: dict[Unit, int] = {}
        # Forwards without gradients count only for units that have no others, as under re-entrant checkpoints.
        self._returning.update([event.unit for event in self._events if event.in_grad])
        for in_grad in (True, False):
            for event in self._events:
                if event.is_begin and event.in_grad is in_grad and (in_grad or event.unit not in self._returning):
                    turns.setdefault(event.unit, event.position)
        self._turns = turns

    def reach(self, record: ForwardRecord) -> None:
        """Pass all events down to the end of the forward of ``record``, whose output gradients exist."""
        self._pass_until(record.end)
        if self._events and self._events[-1].position == record.end:
            self._events.pop()

    def complete(self, record: ForwardRecord) -> None:
        """Pass all events down to the begin of the forward of ``record``, whose input gradients exist."""
        if record.iteration in self.iterations:
            self._pass_until(record.begin - 1)
        elif record.iteration is None:
            self._complete_recomputed(record.unit)

    def _complete_recomputed(self, unit: Unit) -> None:
        """Pass all events after a forward that a re-entrant checkpoint has recomputed.

        The recomputation stands for one of the unit's recorded forwards, none of which is later than the last one not
        passed yet. So every event after that one can be passed.
        """
        for event in reversed(self._events):
            if event.is_begin and event.unit is unit:
                self._pass_until(event.position - 1)
                return

    def finish(self) -> None:
        """Pass all remaining events."""
        self._pass_until(-1)

    def _pass_until(self, position: int) -> None:
        events = self._events
        while events and events[-1].position > position:
            event = events.pop()
            if not event.is_begin:
                if event.weights is not None and self._needs_unshard(event):
                    self._join(event.unit, event.weights)
            elif self._turns.get(event.unit) == event.position:
                self._take_turn(event.unit)

    def _needs_unshard(self, event: Event) -> bool:
        return event.in_grad or event.unit not in self._returning

    def next_all_gather(self, after: Unit) -> Unit | None:
        """Return the unit whose all-gather is next, other than ``after``; None if there is none."""
        for event in reversed(self._events):
            if (
                event.weights is not None
                and event.unit is not after
                and event.unit.needs_all_gather
                and self._needs_unshard(event)
            ):
                return event.unit
        return None


def _position(event: Event) -> int:
    return event.position
