"""Records of forwards: one for each forward of a unit, and the iteration that they belong to."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp_flat.flat import node_will_run
from fsdp_flat.runtime.unit import Unit, Weights

__all__ = ["Event", "ForwardRecord", "Iteration"]


class Event(NamedTuple):
    """The begin or the end of a unit's forward.

    Attributes:
        position: grows by one from event to event of a tree.
        unit: the unit.
        is_begin: the begin; else the end.
        in_grad: gradients were enabled, so a backward may come to this forward and not only to its recomputation.
        weights: at an end to which a backward may come, those that the forward ran with; else None.
    """

    position: int
    unit: Unit
    is_begin: bool
    in_grad: bool
    weights: Weights | None = None


class Iteration:
    """One forward of an outermost unit, and the order in which the forwards of units in it began and ended.

    All ranks record the same events, whichever outputs a rank's loss uses: a backward goes through them in reverse.

    Attributes:
        order: the units in the order in which they began.
        events: the begins and ends.
        gates: autograd nodes on the inputs of units; they live as long as the graph does, which this does not prolong.
        outputs: hooks on the outputs of the outermost unit, which live as long too.
        trains: gradients were enabled where it began, so a backward may come.
        expects_backward: a backward may come to the outputs of a unit.
    """

    __slots__ = ("__weakref__", "events", "expects_backward", "gates", "order", "outputs", "trains")

    def __init__(self) -> None:
        self.order: list[Unit] = []
        self.events: list[Event] = []
        self.trains = torch.is_grad_enabled()
        self.expects_backward = False
        self.gates: list[weakref.ref[Any]] = []
        self.outputs: list[weakref.ref[Any]] = []

    @property
    def is_alive(self) -> bool:
        """Whether a backward can still come here, as far as can be told."""
        return any(ref() is not None for ref in (*self.gates, *self.outputs))

    @property
    def is_in_backward(self) -> bool:
        """Whether the running backward comes here; without gates, whether it may."""
        if not self.gates:
            return self.is_alive
        # The last ones first: a loss nearly always reaches those.
        return any(node_will_run(node) for gate in reversed(self.gates) if (node := gate()) is not None)


@dataclass(slots=True, eq=False)
class ForwardRecord:
    """One forward of a unit to which a backward may come.

    Attributes:
        unit: the unit.
        iteration: where it belongs; None for a recomputation inside a backward.
        weights: those that it ran with.
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
