"""Replays the events of a model's step as units of any strategy run them: bytes by kind, bytes sent, and seconds.

This is a second, independent statement of what docs/architecture.md says of a unit's memory and order; tests compare it
with bytes counted in steps of both fronts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from itertools import takewhile

from fsdp_flat.tools.model_run import StepEntry, StepEvent
from fsdp_flat.tools.planned_units import PlannedHandle, PlannedUnit


class StepPhase(Enum):
    """Enumerates the parts of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class BytesByKind:
    """Counts the bytes of a rank that exist at one moment, by what they are for.

    Attributes:
        parameters: shards of parameters, parameters that no unit manages, and buffers.
        gathered: unsharded parameters, and memory of all-gathers in flight.
        gradients: gradients before, in and after their reduction.
        optimizer: states of the optimizer, and what its step allocates.
        activations: everything else: what forward keeps for backward, and temporary results of both.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class Moment:
    """Describes the memory at one moment of a step.

    Attributes:
        seconds: time since the begin of the step, by the speeds given.
        unit: the name of the unit that came last.
    """

    phase: StepPhase
    seconds: float
    unit: str
    nbytes: BytesByKind


@dataclass(frozen=True, slots=True)
class Speeds:
    """Holds the speeds of a rank; infinite ones take no time.

    Attributes:
        bandwidth: bytes that a rank sends a second.
        flops: floating-point operations a second.
    """

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Holds the facts of a replay that are no unit's.

    Attributes:
        is_accelerator: two reductions may be in flight; else one.
        prefetches_forward: forward begins the all-gather of the next unit early.
        offloads: shards, gradients and states of the optimizer are in host memory, which does not count.
        fixed_nbytes: parameters that no unit manages, and buffers.
        state_nbytes: states of the optimizer.
        step_nbytes: what the optimizer's step allocates besides.
        accumulates: gradients of an earlier backward exist when the step begins, and this step's are added to them.
    """

    is_accelerator: bool
    prefetches_forward: bool
    offloads: bool
    fixed_nbytes: int
    state_nbytes: int
    step_nbytes: int
    accumulates: bool
    speeds: Speeds


class _Memory(Enum):
    """Enumerates the states of a unit's memory that a replay tells apart."""

    SHARDED = 0
    GATHERING = 1
    READY = 2
    PARKED = 3


class _ReplayedUnit:
    def __init__(self, index: int, planned: PlannedUnit) -> None:
        self.index, self.planned, self.handles = index, planned, planned.handles
        self.memory = _Memory.SHARDED
        self.gathered = sum(handle.gathered for handle in self.handles)
        self.staging = sum(handle.staging for handle in self.handles)
        self.communicates = any(handle.num_shards > 1 for handle in self.handles)
        self.gather_sent = sum(handle.gather_row * (handle.num_shards - 1) for handle in self.handles)
        self.gathered_at = 0.0  # when the last all-gather ends
        self.waiting = [0] * len(self.handles)  # bytes of gradients that are not in a flat one yet


@dataclass(slots=True)
class _ReductionInFlight:
    handle: PlannedHandle
    whole: int
    ends_at: float
    reduced: int = 0


class StepReplay:
    """Replays one step.

    Attributes:
        moments: the memory after each event that changed it.
        sent_nbytes: bytes that a rank sends.
        seconds: time of the step without its optimizer.
        exposed_seconds: the part of it in which compute waits for communication.
        flops: floating-point operations of forward and backward, recomputation included.
    """

    def __init__(self, planned: Sequence[PlannedUnit], options: ReplayOptions) -> None:
        self._units = [_ReplayedUnit(index, unit) for index, unit in enumerate(planned)]
        self._root = self._units[0]
        self._options = options
        self.moments: list[Moment] = []
        self.sent_nbytes = 0.0
        self.seconds = self.exposed_seconds = 0.0
        self.flops = 0
        self._network_free_at = 0.0
        self._phase, self._unit_name = StepPhase.FORWARD, planned[0].name
        shards = 0 if options.offloads else sum(handle.shard for unit in planned for handle in unit.handles)
        self._parameters = shards + options.fixed_nbytes
        self._gathered = self._activations = 0
        adds = options.accumulates and not options.offloads
        self._earlier = sum(handle.grad for unit in planned for handle in unit.handles) if adds else 0
        self._gradients = self._earlier
        self._optimizer = 0 if options.offloads else options.state_nbytes
        self._in_flight: list[_ReductionInFlight] = []
        self._parked: _ReplayedUnit | None = None
        self._prefetched: list[_ReplayedUnit] = []
        # The begins and ends of forwards, by call, as positions; and those that a backward has yet to pass.
        self._begin_of: dict[int, int] = {}
        self._end_of: dict[int, int] = {}
        self._events: list[tuple[int, _ReplayedUnit, bool]] = []
        self._first_begin: dict[int, int] = {}
        self._reached: set[int] = set()
        self._order: list[_ReplayedUnit] = []
        self._num_begun = 0

    def run(self, entries: Sequence[StepEntry]) -> StepReplay:
        """Replay the entries of a step, and then its optimizer."""
        in_forward = takewhile(lambda entry: entry.event is not StepEvent.BACKWARD, entries)
        # The order of forwards, which is that of the step before.
        self._order = [self._units[entry.unit] for entry in in_forward if entry.event is StepEvent.FORWARD_BEGIN]
        self._note()
        for entry in entries:
            if entry.unit >= 0:
                self._unit_name = self._units[entry.unit].planned.name
            self._step(entry)
        self._end_backward()
        self._phase = StepPhase.OPTIMIZER
        self._optimizer += 0 if self._options.offloads else self._options.step_nbytes
        self._note()
        return self

    def _note(self) -> None:
        nbytes = BytesByKind(self._parameters, self._gathered, self._gradients, self._optimizer, self._activations)
        self.moments.append(Moment(self._phase, self.seconds, self._unit_name, nbytes))

    def _step(self, entry: StepEntry) -> None:
        in_forward = self._phase is StepPhase.FORWARD
        unit = self._units[entry.unit]
        if entry.event is StepEvent.OPERATOR:
            self._activations = entry.nbytes
            self.flops += entry.flops
            self.seconds += entry.flops / self._options.speeds.flops
            self._note()
        elif entry.event is StepEvent.BACKWARD:
            self._drop_prefetched()
            self._phase = StepPhase.BACKWARD
            self._first_begin = {begun.index: at for at, begun, is_begin in reversed(self._events) if is_begin}
        elif entry.event is StepEvent.FORWARD_BEGIN:
            if in_forward:
                self._begin_forward(unit, entry.call)
            else:
                self._unshard(unit)
        elif entry.event is StepEvent.FORWARD_END:
            if in_forward:
                self._end_forward(unit, entry.call)
        elif entry.event is StepEvent.OUTPUTS:
            self._outputs_reached(unit, entry.call)
        elif entry.event is StepEvent.INPUTS:
            self._inputs_reached(unit, entry.call)
        else:
            if not unit.waiting[entry.handle]:
                self._first_grad(unit.handles[entry.handle])
            unit.waiting[entry.handle] += entry.nbytes
            self._gradients += entry.nbytes
            # The gradient was an operator's result.
            self._activations = max(0, self._activations - entry.nbytes)
            self._note()

    # -- parameters ------------------------------------------------------------------------------------------------

    def _send(self, nbytes: float) -> float:
        """Send bytes once the network is free, and return the time when they are there."""
        self.sent_nbytes += nbytes
        self._network_free_at = max(self._network_free_at, self.seconds) + nbytes / self._options.speeds.bandwidth
        return self._network_free_at

    def _wait_until(self, time: float) -> None:
        waited = max(0.0, time - self.seconds)
        self.seconds += waited
        self.exposed_seconds += waited

    def _begin_unshard(self, unit: _ReplayedUnit) -> None:
        if unit.memory is _Memory.PARKED:
            unit.memory = _Memory.READY
        if unit.memory is not _Memory.SHARDED:
            return
        unit.memory = _Memory.GATHERING
        self._gathered += unit.gathered + unit.staging
        unit.gathered_at = self._send(unit.gather_sent) if unit.communicates else self.seconds
        self._note()

    def _unshard(self, unit: _ReplayedUnit) -> None:
        self._begin_unshard(unit)
        if unit.memory is _Memory.GATHERING:
            self._wait_until(unit.gathered_at)
            unit.memory = _Memory.READY
            self._gathered -= unit.staging

    def _free(self, unit: _ReplayedUnit) -> None:
        if unit.memory is _Memory.SHARDED:
            return
        self._unshard(unit)
        unit.memory = _Memory.SHARDED
        self._gathered -= unit.gathered

    def _free_parked(self) -> None:
        unit, self._parked = self._parked, None
        if unit is not None and unit.memory is _Memory.PARKED:
            self._free(unit)

    def _begin_early(self, unit: _ReplayedUnit) -> None:
        if unit.memory in (_Memory.SHARDED, _Memory.PARKED):
            self._prefetched.append(unit)
            self._begin_unshard(unit)

    def _drop_prefetched(self) -> None:
        units, self._prefetched = self._prefetched, []
        for unit in units:
            self._free(unit)

    def _no_longer_early(self, unit: _ReplayedUnit) -> None:
        if unit in self._prefetched:
            self._prefetched.remove(unit)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _begin_forward(self, unit: _ReplayedUnit, call: int) -> None:
        if self._num_begun == 0:
            for other in self._units:
                if other.handles and not other.communicates:
                    self._unshard(other)
        self._num_begun += 1
        self._begin_of[call] = len(self._events)
        self._events.append((len(self._events), unit, True))
        if unit is self._parked:
            self._free_parked()  # it is all-gathered anew
        self._begin_unshard(unit)
        if unit.handles:
            self._free_parked()
        self._unshard(unit)
        self._no_longer_early(unit)
        if self._prefetched or not self._options.prefetches_forward:
            return
        following = [other for other in self._order[self._num_begun :] if other.communicates]
        if following:
            self._begin_early(following[0])

    def _end_forward(self, unit: _ReplayedUnit, call: int) -> None:
        self._end_of[call] = len(self._events)
        self._events.append((len(self._events), unit, False))
        wanted = unit.planned.reshard_after_forward
        wanted = unit is not self._root if wanted is None else wanted
        if not wanted or not unit.gathered:
            return
        if not unit.communicates or unit is self._root:
            self._free(unit)
            return
        unit.memory = _Memory.PARKED
        if self._parked is not unit:
            self._free_parked()
        self._parked = unit

    # -- backward --------------------------------------------------------------------------------------------------

    def _outputs_reached(self, unit: _ReplayedUnit, call: int) -> None:
        if call in self._reached:
            return
        self._reached.add(call)
        if call in self._end_of:
            end = self._end_of[call]
            self._pass_until(end)
            if self._events and self._events[-1][0] == end:
                self._events.pop()
        self._make_room_for(unit)
        self._unshard(unit)
        self._no_longer_early(unit)
        self._prefetch_backward(unit)

    def _inputs_reached(self, unit: _ReplayedUnit, call: int) -> None:
        if call in self._begin_of:
            self._pass_until(self._begin_of[call] - 1)
            return
        for position, other, is_begin in reversed(self._events):
            if is_begin and other is unit:
                self._pass_until(position - 1)
                return

    def _pass_until(self, position: int) -> None:
        while self._events and self._events[-1][0] > position:
            at, unit, is_begin = self._events.pop()
            if is_begin:
                if self._first_begin[unit.index] == at:
                    self._post_backward(unit)
            elif unit.communicates:
                self._make_room_for(unit)
                self._begin_unshard(unit)
                self._no_longer_early(unit)
                self._prefetch_backward(unit)

    def _make_room_for(self, unit: _ReplayedUnit) -> None:
        if unit is self._parked:
            self._parked = None
        elif unit.communicates and unit.memory is _Memory.SHARDED and unit is not self._root:
            self._free_parked()

    def _prefetch_backward(self, unit: _ReplayedUnit) -> None:
        if not unit.communicates or self._prefetched:
            return
        for _, other, is_begin in reversed(self._events):
            if not is_begin and other is not unit and other.communicates:
                self._begin_early(other)
                return

    def _post_backward(self, unit: _ReplayedUnit) -> None:
        self._free(unit)
        for index, handle in enumerate(unit.handles):
            if handle.trainable:
                self._begin_reduction(unit, index, handle)

    def _first_grad(self, handle: PlannedHandle) -> None:
        """Note what exists for a moment when the first gradient of a handle comes.

        That is the sum of a reduction in flight, without replicas, which a CPU ends then if other ranks have come as
        far (it ends with the next one at the latest, which is counted); and if nothing is sharded, where flat gradients
        are not used again, memory of the next one.
        """
        extra = 0 if handle.num_shards > 1 else handle.whole_grad
        if not self._options.is_accelerator:
            in_flight = [reduction.handle for reduction in self._in_flight]
            extra = max([extra, *[other.reduced for other in in_flight if other.num_replicas == 1]])
        self._gradients += extra
        self._note()
        self._gradients -= extra

    def _begin_reduction(self, unit: _ReplayedUnit, index: int, handle: PlannedHandle) -> None:
        while len(self._in_flight) >= (2 if self._options.is_accelerator else 1):
            self._finish_reduction(self._in_flight.pop(0))
        self._gradients += handle.whole_grad
        self._note()
        self._gradients -= unit.waiting[index]
        unit.waiting[index] = 0
        whole = handle.whole_grad
        if handle.cast_grad:
            self._gradients += handle.cast_grad
            self._note()
            self._gradients -= handle.whole_grad
            whole = handle.cast_grad
        sent = handle.reduce_row * (handle.num_shards - 1.0)
        sent += 2 * handle.reduce_row * (handle.num_replicas - 1) / handle.num_replicas
        reduction = _ReductionInFlight(handle, whole, self._send(sent))
        if self._options.is_accelerator:
            self._allocate_sum(reduction)
        self._in_flight.append(reduction)

    def _allocate_sum(self, reduction: _ReductionInFlight) -> None:
        reduction.reduced = reduction.handle.reduced
        self._gradients += reduction.reduced
        self._note()

    def _finish_reduction(self, reduction: _ReductionInFlight) -> None:
        self._wait_until(reduction.ends_at)
        handle = reduction.handle
        if not reduction.reduced:
            self._allocate_sum(reduction)
        # The sum, or without sharding the whole gradient, becomes the optimizer's gradient, if its dtype is that.
        held = reduction.reduced or reduction.whole
        if self._options.offloads:
            self._gradients -= held
        elif handle.grad != held:
            self._gradients += handle.grad
            self._note()
            self._gradients -= held
        if reduction.reduced:
            self._gradients -= reduction.whole

    def _end_backward(self) -> None:
        self._pass_until(-1)
        self._drop_prefetched()
        self._free_parked()
        for unit in self._units:
            self._free(unit)
        while self._in_flight:
            self._finish_reduction(self._in_flight.pop(0))
        self._note()
        self._gradients -= self._earlier
