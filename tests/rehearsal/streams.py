"""Streams and events that record order and run nothing: a fake of ``torch.Stream`` and ``torch.Event``.

Every queue of work (the host, each stream, the internal stream of each process group) has a vector clock. An
operation takes the next number of its queue; an event is a copy of a queue's clock; waiting for an event takes the
maximum of two clocks. An operation A is ordered before an operation B if the clock of B's queue had reached A's
number when B was issued. Work that the host issues comes after everything that the host itself has done or waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Clock = dict[int, int]
Stamp = tuple[int, int]


def join(clock: Clock, other: Clock) -> None:
    """Raise ``clock`` to the maximum of both."""
    for queue, number in other.items():
        if clock.get(queue, 0) < number:
            clock[queue] = number


def is_ordered(stamp: Stamp, clock: Clock) -> bool:
    """Say whether the operation with ``stamp`` comes before an operation issued with ``clock``."""
    return clock.get(stamp[0], 0) >= stamp[1]


class Queue:
    """Runs its operations one after another: the host or a stream.

    Attributes:
        id: number of the queue.
        name: name for reports.
        clock: numbers of the operations of every queue that come before the next one of this queue.
    """

    _ids = itertools.count()

    def __init__(self, name: str) -> None:
        self.id = next(Queue._ids)
        self.name = name
        self.clock: Clock = {}

    def tick(self) -> Stamp:
        """Number the next operation."""
        number = self.clock.get(self.id, 0) + 1
        self.clock[self.id] = number
        return self.id, number


class RecordingEvent:
    """Stands for a ``torch.Event`` that was recorded on a queue."""

    def __init__(self, machine: Machine, clock: Clock | None = None) -> None:
        self._machine = machine
        self._clock: Clock = dict(clock or {})

    @property
    def clock(self) -> Clock:
        """Return the clock that the queue had when the event was recorded last."""
        return self._clock

    def record(self, stream: RecordingStream | None = None) -> None:
        """Record on ``stream``, by default the current one."""
        self._clock = dict((stream or self._machine.current).clock)

    def wait(self, stream: RecordingStream | None = None) -> None:
        """Have ``stream``, by default the current one, wait for this event."""
        (stream or self._machine.current).wait_event(self)

    def query(self) -> bool:
        """Say whether the host already comes after the event; a device may be slower than any host."""
        return all(is_ordered(stamp, self._machine.host.clock) for stamp in self._clock.items())

    def synchronize(self) -> None:
        """Have the host wait."""
        self._machine.host_wait("event synchronize", "Event.synchronize", self._clock)


class RecordingStream(Queue):
    """Stands for a ``torch.Stream``."""

    priority = 0

    def __init__(self, machine: Machine, name: str, device: Any = None) -> None:
        super().__init__(name)
        self._machine = machine
        self._before: list[RecordingStream] = []
        self.device = device

    def wait_event(self, event: RecordingEvent) -> None:
        """Order operations issued here from now on after ``event``."""
        join(self.clock, event.clock)

    def wait_stream(self, stream: RecordingStream) -> None:
        """Order operations issued here from now on after those issued on ``stream`` so far."""
        join(self.clock, stream.clock)

    def record_event(self, event: RecordingEvent | None = None) -> RecordingEvent:
        """Record an event, a new one by default."""
        event = RecordingEvent(self._machine) if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Say whether the host already comes after everything issued here."""
        return self.record_event().query()

    def synchronize(self) -> None:
        """Have the host wait for everything issued here."""
        self._machine.host_wait("stream synchronize", "Stream.synchronize", self.clock)

    def __enter__(self) -> RecordingStream:
        self._before.append(self._machine.current)
        self._machine.current = self
        return self

    def __exit__(self, *_error: object) -> None:
        self._machine.current = self._before.pop()

    def __repr__(self) -> str:
        return f"<{self.name} stream>"


class Machine:
    """Stands for one host, one accelerator and its streams.

    Attributes:
        device: the accelerator.
        host: the queue of the Python thread.
        compute: the default stream.
        current: the stream to which operations go now.
        streams: every stream, by order of creation.
        on_host_wait: called with the kind and the operation for each wait of the host for the device.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.host = Queue("host")
        self.streams: list[RecordingStream] = []
        self.compute = self.new_stream(device, name="compute")
        self.current = self.compute
        self.on_host_wait: Callable[[str, str], None] = lambda kind, op: None
        self._of_groups: dict[Any, RecordingStream] = {}

    def new_stream(self, device: Any = None, *, name: str = "", priority: int = 0) -> RecordingStream:
        """Make a side stream."""
        stream = RecordingStream(self, name or f"side {len(self.streams)}", device or self.device)
        stream.priority = priority
        self.streams.append(stream)
        return stream

    def current_stream(self, _device: Any = None) -> RecordingStream:
        """Return the stream to which operations go now."""
        return self.current

    def stream_of_group(self, group: Any, name: str) -> RecordingStream:
        """Return the internal stream on which a process group runs its collectives."""
        if group not in self._of_groups:
            self._of_groups[group] = self.new_stream(name=name)
        return self._of_groups[group]

    def launch(self, queue: Queue) -> Stamp:
        """Number an operation that the host issues to ``queue``."""
        if queue is not self.host:
            join(queue.clock, self.host.clock)
        return queue.tick()

    def host_wait(self, kind: str, op: str, clock: Clock) -> None:
        """Have the host wait until the device has come to ``clock``."""
        self.on_host_wait(kind, op)
        join(self.host.clock, clock)

    def synchronize(self, op: str = "synchronize") -> None:
        """Have the host wait for every stream."""
        for stream in self.streams:
            join(self.host.clock, stream.clock)
        self.on_host_wait("device synchronize", op)
