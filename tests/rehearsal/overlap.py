"""Finds all-gathers that depend on compute they need not wait for, and counts the unsharded buffers that are alive.

An all-gather and what follows it on its stream (the copies to parameters) may depend on the last use of the memory that
it takes and on the optimizer. It must not depend on the compute of the unit that runs before its own: then no compute
hides it. Dependence is read off the vector clocks of ``streams``, so it holds for any speed of device, host and link.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_flat.composable import trace
from fsdp_flat.core import units_of
from tests.rehearsal import seam
from tests.rehearsal.kit import Rehearsal
from tests.rehearsal.memory import is_issued_by_library
from tests.rehearsal.streams import Clock, Queue, Stamp, is_ordered

_BEGINS = ("pre_forward", "pre_backward")
_ENDS = ("post_forward", "post_backward")


@dataclass(slots=True)
class _Gathering:
    """Describes operation ``stamp`` of the all-gather of ``unit``: behind ``clock``, while run ``run`` was the last."""

    unit: str
    op: str
    stamp: Stamp
    clock: Clock
    run: int


@dataclass(frozen=True, slots=True)
class _Computed:
    """Names a unit and the operation that it computed last."""

    unit: str
    last: Stamp


@dataclass(slots=True)
class _Run:
    """Describes one forward or backward of a unit.

    Attributes:
        follows: the unit that computed last before it, with the operation; the outermost one only if no other did,
            since it adds up gradients between units. None for the outermost unit of a forward itself, whose all-gather
            depends on the optimizer, and so on everything before.
    """

    unit: str
    in_backward: bool
    follows: _Computed | None


@dataclass
class Overlap:
    """Records the forwards and backwards of units, their all-gathers, and the buffers alive meanwhile.

    Attributes:
        most_alive: the largest number of units besides the root with unsharded buffers at once, in forwards and in
            backwards.
    """

    runs: list[_Run] = field(default_factory=list)
    computed: _Computed | None = None
    gatherings: list[_Gathering] = field(default_factory=list)
    most_alive: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def begin(self, unit: str, *, in_backward: bool, is_outermost: bool) -> _Run:
        """Begin a forward or backward of a unit."""
        if is_outermost and not in_backward:
            self.computed = None
        follows = self.computed if self.computed is not None and self.computed.unit != unit else None
        self.runs.append(_Run(unit, in_backward, follows))
        return self.runs[-1]

    def exposed(self) -> list[str]:
        """Return a text for each operation of an all-gather that depends on the compute before its unit's."""
        found = []
        for gathering in self.gatherings:
            run = next((run for run in self.runs[gathering.run :] if run.unit == gathering.unit), None)
            if run is not None and run.follows is not None and is_ordered(run.follows.last, gathering.clock):
                where = "backward" if run.in_backward else "forward"
                found.append(f"{gathering.op} for the {where} of {run.unit!r} waits for that of {run.follows.unit!r}")
        return list(dict.fromkeys(found))


@contextmanager
def launched(run: Rehearsal) -> Iterator[list[str]]:
    """Provide the operations that the library issues to streams inside the block, except for collectives."""
    names: list[str] = []
    record = run.recorder.note

    def note(op: str, queue: Queue, reads: Any = (), writes: Any = ()) -> None:
        record(op, queue, reads, writes)
        if queue is not run.machine.host and op.startswith("aten::") and "empty" not in op and is_issued_by_library():
            names.append(op)

    with mock.patch.object(run.recorder, "note", note):
        yield names


@contextmanager
def watched(run: Rehearsal, model: nn.Module) -> Iterator[Overlap]:
    """Record what overlaps during the steps of ``model`` inside the block."""
    overlap, stack, units = Overlap(), [], units_of(model)
    names = {unit.name for unit in units}
    record = run.recorder.note
    with trace(model) as events, seam.gathering_units() as gathering:
        position = 0

        def note(op: str, queue: Queue, reads: Any = (), writes: Any = ()) -> None:
            nonlocal position
            record(op, queue, reads, writes)
            for event, name in events[position:]:
                if event in _BEGINS and name in names:
                    is_outermost = not stack
                    stack.append(overlap.begin(name, in_backward=event == "pre_backward", is_outermost=is_outermost))
                elif event in _ENDS and stack:
                    stack.pop()
                elif event == "root_post_backward":
                    stack.clear()  # a recomputation may end without its post_forward
            position = len(events)
            if queue is run.machine.compute and stack and not is_issued_by_library():
                if len(stack) > 1 or overlap.computed is None or overlap.computed.unit == stack[-1].unit:
                    overlap.computed = _Computed(stack[-1].unit, (queue.id, queue.clock[queue.id]))
            elif gathering and queue not in (run.machine.compute, run.machine.host):
                last = max(0, len(overlap.runs) - 1)
                stamp = queue.id, queue.clock[queue.id]
                overlap.gatherings.append(_Gathering(gathering[-1], op, stamp, dict(queue.clock), last))
            where = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            overlap.most_alive[where] = max(overlap.most_alive[where], seam.num_unsharded(units[1:]))

        run.recorder.note = note  # type: ignore[method-assign]
        try:
            yield overlap
        finally:
            del run.recorder.note  # type: ignore[method-assign]
