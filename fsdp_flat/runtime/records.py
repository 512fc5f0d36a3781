"""Records forwards: one record for each forward of a unit, and the iteration that contains it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp_flat.flat import node_will_run
from fsdp_flat.runtime.unit import Unit, Weights

__all__ = ["Event", "ForwardRecord", "Iteration"]


class Event(NamedTuple):
    """Marks the begin or the end of a unit's forward.

    Attributes:
        position: increases by one with each event of a tree.
        unit: the unit.
        is_begin: True for the begin, False for the end.
        in_grad: gradients were enabled, so a backward may reach this forward and not only its recomputation.
        weights: for an end that a backward may reach, the weights that the forward ran with; else None.
    """

    position: int
    unit: Unit
    is_begin: bool
    in_grad: bool
    weights: Weights | None = None


class Iteration:
    """Records one forward of an outermost unit: the order in which the forwards of its units began and ended.

    All ranks record the same events, whichever outputs a rank's loss uses: a backward goes through them in reverse.

    Attributes:
        order: the units in the order in which they began.
        events: the begins and ends.
        post_backward_nodes: weak references to autograd nodes on the inputs of units; they do not keep the graph alive.
        outputs: weak references to hooks on the outputs of the outermost unit, which live as long as the graph.
        trains: gradients were enabled at its begin, so a backward may follow.
        expects_backward: a backward may reach the outputs of a unit.
    """

    __slots__ = ("__weakref__", "events", "expects_backward", "order", "outputs", "post_backward_nodes", "trains")

    def __init__(self) -> None:
        self.order: list[Unit] = []
        self.events: list[Event] = []
        self.trains = torch.is_grad_enabled()
        self.expects_backward = False
        self.post_backward_nodes: list[weakref.ref[Any]] = []
        self.outputs: list[weakref.ref[Any]] = []

    @property
    def is_alive(self) -> bool:
        """True if a backward may still reach this iteration: some of its nodes or hooks are alive."""
        return any(ref() is not None for ref in (*self.post_backward_nodes, *self.outputs))

    @property
    def is_in_backward(self) -> bool:
        """True if the running backward reaches this iteration; without post-backward nodes, if it may."""
        if not self.post_backward_nodes:
            return self.is_alive
        # Check the last ones first: a loss nearly always reaches those.
        return any(node_will_run(node) for gate in reversed(self.post_backward_nodes) if (node := gate()) is not None)


@dataclass(slots=True, eq=False)
class ForwardRecord:
    """Records one forward of a unit that a backward may reach.

    Attributes:
        unit: the unit.
        iteration: the iteration that contains it; None for a recomputation inside a backward.
        weights: the weights that it ran with.
        begin: position of its begin in the iteration's events.
        end: position of its end; -1 while it runs.
        task: id of the autograd graph task that reached its outputs last, -1 before.
    """

    unit: Unit
    iteration: Iteration | None
    weights: Weights
    begin: int = -1
    end: int = -1
    task: int = -1
