"""Records forwards, and runs one backward of a tree through their events, from the last to the first.

Autograd traverses a graph in the reverse order of its construction. Once the gradients of a forward's inputs exist,
autograd has passed everything recorded after that forward began. A backward is therefore a cursor over the events of
its iterations, which moves from the last event to the first:

* where it passes the end of a unit's forward, the unit's parameters are unsharded for the backward;
* where it passes the begin of a unit's first forward with gradients, the unit's post-backward runs: its parameters are
  resharded and its gradient is reduced.

Every rank passes every event, including those of units that its own loss does not use: it joins their all-gathers and
adds zeros to their gradients. The order of collectives therefore depends on the forwards alone and is the same on all
ranks. Gradients that appear after their unit's post-backward, or without a forward of the unit, are reduced at the end
of the backward (see :mod:`finish`).

The backward of every rank of a shard group must go through the same iterations. Replicas have only the reductions in
common, and must reduce the same units in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import torch

from fsdp_flat.core.memory import MemoryState, WeightsVersion
from fsdp_flat.core.torch_core import graph_task_id, keeps_graph, node_will_run
from fsdp_flat.core.unit import Unit

# Older iterations than this many are dropped: a program that evaluates with gradients enabled never runs backward.
_MAX_PENDING_ITERATIONS = 32
# States in which a backward all-gathers.
_FREED = (MemoryState.SHARDED, MemoryState.SHARDED_POST_FORWARD)


class Event(NamedTuple):
    """Marks the begin or the end of a unit's forward.

    Attributes:
        position: increases by one with each event of a tree.
        is_reached: a backward may reach the forward, or recompute it (in a re-entrant checkpoint).
        node_number: the number of the first autograd node made after the event; -1 inside an autograd function.
        weights: for an end that a backward may reach, the weights that the forward ran with; else None.
    """

    position: int
    unit: Unit
    is_begin: bool
    is_reached: bool
    node_number: int
    weights: WeightsVersion | None

    @property
    def unshards(self) -> bool:
        """True if the unit's parameters are unsharded where a backward passes the event."""
        return self.weights is not None and self.unit.control.unshard_in_backward


class Iteration:
    """Records one forward of an outermost unit: the order in which the forwards of its units began and ended.

    All ranks record the same events, whichever outputs a rank's loss uses: a backward goes through them in reverse.

    Attributes:
        compiler: the compiler of the code that calls the outermost unit; None if nothing compiles it.
        order: the units in the order in which they began.
        post_backward_nodes: weak references to autograd nodes on the inputs of units; they do not keep the graph alive.
        outputs: weak references to hooks on the outputs of the outermost unit, which live as long as the graph.
        trains: gradients were enabled when the iteration began, so a backward may follow.
        expects_backward: a backward may reach the outputs of a unit.
        is_open_ended: a backward may reach parameters of a unit without passing a hooked output.
    """

    __slots__ = (
        "__weakref__",
        "compiler",
        "events",
        "expects_backward",
        "is_open_ended",
        "order",
        "outputs",
        "post_backward_nodes",
        "trains",
    )

    def __init__(self, compiler: Any = None) -> None:
        self.compiler = compiler
        self.order: list[Unit] = []
        self.events: list[Event] = []
        self.trains = torch.is_grad_enabled()
        self.expects_backward = self.is_open_ended = False
        self.post_backward_nodes: list[weakref.ref[Any]] = []
        self.outputs: list[weakref.ref[Any]] = []

    @property
    def is_alone(self) -> bool:
        """True if a backward through this iteration sends nothing: ranks may run other numbers of such iterations.

        It began at an inner unit, called by itself; its units are unsharded, and leave their gradients unreduced.
        """
        return self.order[0] is not self.order[0].step.root and not any(
            unit.reduces_gradients or (unit.needs_all_gather and unit.state in _FREED) for unit in self.order
        )

    @property
    def is_alive(self) -> bool:
        """True if a backward may still reach this iteration: some of its nodes or hooks are alive."""
        return any(ref() is not None for ref in (*self.post_backward_nodes, *self.outputs))

    @property
    def is_in_backward(self) -> bool:
        """True if the running backward reaches a post-backward node; without such nodes, if a hook is alive."""
        if not self.post_backward_nodes:
            return self.is_alive
        # Check the last nodes first: a loss nearly always reaches them.
        return any(
            node_will_run(node) for node_ref in reversed(self.post_backward_nodes) if (node := node_ref()) is not None
        )


class PendingIterations:
    """Holds the iterations that no backward has reached yet, the same on every rank of a replica.

    Replicas may hold others: a forward that no backward reaches all-gathers, and nothing else, so it concerns the ranks
    of its shard groups alone.
    """

    def __init__(self) -> None:
        self._iterations: list[Iteration] = []

    def add(self, iteration: Iteration) -> None:
        """Add an iteration that begins."""
        self._iterations = [*self._iterations, iteration][-_MAX_PENDING_ITERATIONS:]

    def remove(self, iterations: Collection[Iteration]) -> None:
        """Remove iterations, some of which may not be pending."""
        self._iterations = [iteration for iteration in self._iterations if iteration not in iterations]

    def adopt(self, other: PendingIterations) -> None:
        """Add the iterations that are pending in ``other``."""
        self._iterations += [iteration for iteration in other._iterations if iteration not in self._iterations]

    def of_backward(self, any_of_replica: Callable[[Sequence[bool]], list[bool]]) -> list[Iteration]:
        """Return the iterations that the running backward goes through on any rank of this rank's replica.

        Drop those whose graphs are freed. If several are pending, ``any_of_replica`` exchanges flags: it returns for
        each whether it is true on any rank of the replica. So the ranks of a shard group agree on the first forward of
        each unit in this backward, where its post-backward runs. Iterations that an earlier backward has removed are
        included when autograd reaches them.
        """
        if len(self._iterations) < 2:
            return [iteration for iteration in self._iterations if iteration.is_in_backward]
        alone = [iteration for iteration in self._iterations if iteration.is_alone]
        self.remove([iteration for iteration in alone if not iteration.is_alive])
        own = [iteration for iteration in alone if iteration.is_in_backward]
        pending = [iteration for iteration in self._iterations if iteration not in alone]
        reached = [iteration.is_in_backward for iteration in pending]
        if len(pending) > 1:
            flags = any_of_replica([*reached, *[iteration.is_alive for iteration in pending]])
            reached, alive = flags[: len(pending)], flags[len(pending) :]
            self.remove(set(pending) - set(compress(pending, alive)))
        return own + list(compress(pending, reached))


@dataclass(slots=True, eq=False)
class ForwardRecord:
    """Records one forward of a unit that a backward may reach; ``begin`` and ``end`` are positions of its events."""

    unit: Unit
    iteration: Iteration | None  # None for a recomputation inside a backward
    begin: int = -1
    end: int = -1
    weights: WeightsVersion = field(init=False)  # set once the unit is unsharded
    task: int = -1  # id of the autograd graph task that last reached the forward's outputs

    @property
    def ran_without_gradients(self) -> bool:
        """True if units ran below this outermost forward, and no backward may reach any of them."""
        assert self.iteration is not None
        nested = [event for event in self.iteration.events if event.unit is not self.unit]
        return bool(nested) and not any(event.is_reached for event in nested)


class Backward:
    """Tracks one backward of a tree, from the point where autograd first reaches the tree to the end.

    Args:
        unshard: begins the all-gather of a unit at the end of its forward, whether or not this rank needs the unit.
        post_backward: runs a unit's post-backward: reshards its parameters and reduces its gradient.

    Attributes:
        keeps_graph: the backward records a graph (``create_graph=True``).
        keeps_iterations: a later backward may go through the same iterations; the same on every rank.
        has_resharded: a unit has been resharded.
        callback: returns the function that autograd, which alone holds it, calls at the end; None once it is dropped.
    """

    def __init__(self, unshard: Callable[[Unit, WeightsVersion], None], post_backward: Callable[[Unit], None]) -> None:
        self.keeps_graph = self.keeps_iterations = torch.is_grad_enabled()
        # Whether autograd keeps the graph for another backward; ranks may differ.
        self.retains_graph = graph_task_id() != -1 and keeps_graph()
        self.callback: Callable[[], object] | None = None
        self.has_resharded = False
        self._unshard = unshard
        self._post_backward = post_backward
        self.iterations: set[Iteration] = set()
        # Events not passed yet, the next one last; and the position of each unit's post-backward.
        self._events: list[Event] = []
        self._post_backward_at: dict[Unit, int] = {}

    @property
    def is_lost(self) -> bool:
        """True if autograd has dropped the callback at the end of the backward, which has raised."""
        return self.callback is None or self.callback() is None

    @property
    def units(self) -> set[Unit]:
        """The units that ran in the iterations."""
        return {unit for iteration in self.iterations for unit in iteration.order}

    def include(self, iterations: list[Iteration]) -> None:
        """Add iterations whose events the backward must pass."""
        new = [iteration for iteration in iterations if iteration not in self.iterations]
        self.iterations.update(new)
        self._events.extend([event for iteration in new for event in iteration.events])
        if len(self.iterations) > 1:
            self._events.sort(key=lambda event: event.position)
        self._post_backward_at = {
            event.unit: event.position for event in reversed(self._events) if event.is_begin and event.is_reached
        }

    def reach(self, record: ForwardRecord) -> None:
        """Pass all events down to the end of the forward of ``record``, whose output gradients exist."""
        assert record.iteration is not None
        if record.iteration not in self.iterations:
            self.include([record.iteration])
        self._pass_until(record.end)
        if self._events and self._events[-1].position == record.end:
            self._events.pop()

    @torch.no_grad()
    def recompute(self, node_number: int) -> None:
        """Pass all events after the autograd node ``node_number``, in whose backward a forward is recomputed.

        The node may be below units without hooks, of which this rank does not use what they computed. Stop at forwards
        in a re-entrant checkpoint: the node may be that of the checkpoint.
        """
        while self._events and self._events[-1].node_number > node_number:
            self._pass_event()

    def complete(self, record: ForwardRecord) -> None:
        """Pass all events down to the begin of the forward of ``record``, whose input gradients exist."""
        if record.iteration is not None:
            if record.iteration not in self.iterations:
                self.include([record.iteration])
            self._pass_until(record.begin - 1)
        else:
            # The recomputed forward is the unit's last one whose begin is not passed yet, or an earlier one. So every
            # event after that begin can be passed.
            for event in reversed(self._events):
                if event.is_begin and event.unit is record.unit:
                    self._pass_until(event.position - 1)
                    return

    def finish(self) -> None:
        """Pass all remaining events."""
        self._pass_until(-1)

    def _pass_until(self, position: int) -> None:
        while self._events and self._events[-1].position > position:
            self._pass_event()

    def _pass_event(self) -> None:
        event = self._events.pop()
        if not event.is_begin:
            if event.unshards:
                assert event.weights is not None
                self._unshard(event.unit, event.weights)
        elif self._post_backward_at.get(event.unit) == event.position:
            self._post_backward(event.unit)
            self.has_resharded = True

    def next_all_gathers(self, after: Unit, num: int) -> list[Unit]:
        """Return the units other than ``after`` whose all-gathers are next: of ``num`` backwards that follow.

        Where units are inside units, the backward of a unit begins with that of the last unit inside it: both count as
        one.
        """
        found, num_before = list[Unit](), 0
        for event in reversed(self._events):
            unit = event.unit
            if event.is_begin:
                if len(found) > num_before:
                    num, num_before = num - 1, len(found)
                    if num == 0:
                        break
            elif unit is not after and unit.needs_all_gather and event.unshards:
                found.append(unit)
        return found
