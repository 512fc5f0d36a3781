"""Records of forwards: one for each forward of a unit, and the iteration that they belong to."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_flat.flat import node_will_run
from fsdp_flat.runtime.unit import Unit, Weights

__all__ = ["Event", "ForwardRecord", "Iteration"]


@dataclass(frozen=True, slots=True)
class Event:
    """The begin or the end of a unit's forward.

    Attributes:
        position: grows by one from event to event of a tree.
        unit: the unit.
        is_begin: the begin; else the end.
        weights: at an end to which a backward may come, those that the forward ran with; else None.
    """

    position: int
    unit: Unit
    is_begin: bool
    weights: Weights | None = None


class Iteration:
    """One forward of an outermost unit, and the order in which the forwards of units in it began and ended.

    All ranks record the same events, whichever outputs a rank's loss uses: a backward goes through them in reverse.

    Attributes:
        order: the units in the order in which they began.
        events: the begins and ends.
        trains: gradients were enabled where it began, so a backward may come.
        expects_backward: a backward may come to the outputs of a unit.
    """

    __slots__ = ("__weakref__", "_gates", "events", "expects_backward", "order", "trains")

    def __init__(self) -> None:
        self.order: list[Unit] = []
        self.events: list[Event] = []
        self.trains = torch.is_grad_enabled()
        self.expects_backward = False
        # Autograd nodes on the inputs of units; they live as long as the graph does, which this must not prolong.
        self._gates: list[weakref.ref[Any]] = []

    def add_gate(self, node: Any) -> None:
        """Remembers the autograd node on the inputs of a forward."""
        self._gates.append(weakref.ref(node))

    @property
    def is_alive(self) -> bool:
        """Whether a backward can still come to one of the nodes."""
        return any(gate() is not None for gate in self._gates)

    @property
    def is_in_backward(self) -> bool:
        """Whether the running backward comes to one of the nodes."""
        # The last ones first: a loss nearly always reaches those.
        return any(node_will_run(node) for gate in reversed(self._gates) if (node := gate()) is not None)


class ForwardRecord:
    """One forward of a unit to which a backward may come.

    Attributes:
        unit: the unit.
        iteration: where it belongs; None for a recomputation inside a backward.
        begin: position of its begin in the iteration's events.
        end: position of its end; -1 while it runs.
        weights: those that it ran with.
        task: id of the autograd graph task that reached its outputs last, -1 before.
    """

    __slots__ = ("begin", "end", "iteration", "task", "unit", "weights")

    def __init__(self, unit: Unit, iteration: Iteration | None, begin: int) -> None:
        self.unit = unit
        self.iteration = iteration
        self.begin = begin
        self.end = -1
        self.weights = unit.weights(unit.wants_full_precision)
        self.task = -1
