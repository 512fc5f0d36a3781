"""Stands for the ranks and the accelerator of a job: groups that send nothing, streams, and the time they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_flat.comm import PLANNED, Pending, Streams
from fsdp_flat.comm.torch_comm import new_group
from fsdp_flat.tools.torch_tools import FakeStore, known_groups

# Ranks that no real group has: the library keeps groups by their ranks.
_OTHER_RANKS = 1 << 24
_numbers = count()


class PlannedGroups(NamedTuple):
    """Holds the groups in which this process is rank 0."""

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup

    def mesh(self) -> torch.Tensor:
        """Return the global ranks of the replicate group (dim 0) by the shard group (dim 1)."""
        ranks = torch.arange(self.replicate.size() * self.shard.size(), dtype=torch.int)
        mesh = (ranks + 2 * _OTHER_RANKS).view(self.replicate.size(), self.shard.size())
        mesh[0] = torch.tensor(dist.get_process_group_ranks(self.shard))
        mesh[:, 0] = torch.tensor(dist.get_process_group_ranks(self.replicate))
        return mesh


@contextmanager
def planned_groups(num_shards: int, num_replicas: int) -> Iterator[PlannedGroups]:
    """Provide groups of torch's "fake" backend inside the block, beside those that the caller may have."""
    is_alone = not dist.is_initialized()
    before = set() if is_alone else known_groups()
    if is_alone:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield PlannedGroups(_group_of(num_shards), _group_of(num_replicas))
    finally:
        if is_alone:
            dist.destroy_process_group()
        else:
            for group in known_groups() - before:
                dist.destroy_process_group(group)


def _group_of(num_ranks: int) -> dist.ProcessGroup:
    number, default = next(_numbers), dist.group.WORLD
    assert default is not None
    ranks = [dist.get_rank(), *range(_OTHER_RANKS, _OTHER_RANKS + num_ranks - 1)]
    name = f"fsdp_flat_plan_{number}"
    return new_group(ranks, name, backend="fake", timeout=timedelta(minutes=1), description="plan")


class Machine:
    """Says when the work of a rank ends, if its speeds are all that takes time.

    Args:
        bandwidth: bytes that a rank sends a second; messages follow each other.
        flops: floating-point operations a second; work of one stream follows each other.

    Attributes:
        compute: the stream of compute.
        current: the stream that work is issued to.
        sent_nbytes, flops: what was sent and computed since :meth:`begin`.
        exposed_seconds: the time in which compute waited for communication since then.
    """

    def __init__(self, bandwidth: float, flops: float) -> None:
        self._bandwidth, self._flops_a_second = bandwidth, flops
        self.compute = self.current = PlannedStream(self)
        self._streams = [self.compute]
        self._network_free_at = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin a step, when all earlier work has ended."""
        self._began_at = max(self._network_free_at, *[stream.time for stream in self._streams])
        for stream in self._streams:
            stream.time = self._began_at
        self._network_free_at = self._began_at
        self.sent_nbytes, self.flops, self.exposed_seconds = 0.0, 0, 0.0

    @property
    def seconds(self) -> float:
        """The time of compute since the step began."""
        return self.compute.time - self._began_at

    def new_stream(self, _device: torch.device, *, priority: int = 0) -> PlannedStream:
        """Create another stream."""
        self._streams.append(PlannedStream(self))
        return self._streams[-1]

    def run(self, flops: int) -> None:
        """Compute, on the current stream."""
        self.flops += flops
        self.current.time += flops / self._flops_a_second

    def send(self, nbytes: float) -> float:
        """Send bytes once the current stream has come so far and the network is free; return when they are there."""
        self.sent_nbytes += nbytes
        self._network_free_at = max(self._network_free_at, self.current.time) + nbytes / self._bandwidth
        return self._network_free_at

    def wait_for_network(self) -> None:
        """Have the current stream wait for all that was sent."""
        self.current.wait_until(self._network_free_at)


class PlannedStream:
    """Stands for a stream of an accelerator, as ``torch.Stream``."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.time = machine, 0.0
        self._outer: list[PlannedStream] = []

    def wait_until(self, time: float) -> None:
        """Have later work wait until a time."""
        if self is self._machine.compute:
            self._machine.exposed_seconds += max(0.0, time - self.time)
        self.time = max(self.time, time)

    def wait_stream(self, other: PlannedStream) -> None:
        """Have later work wait for all work of another stream."""
        self.wait_until(other.time)

    def wait_event(self, event: PlannedEvent) -> None:
        """Have later work wait for an event."""
        self.wait_until(event.time)

    def record_event(self) -> PlannedEvent:
        """Return the event at which all work issued so far has ended."""
        return PlannedEvent(self.time)

    def __enter__(self) -> PlannedStream:
        self._outer.append(self._machine.current)
        self._machine.current = self
        return self

    def __exit__(self, *_error: object) -> None:
        self._machine.current = self._outer.pop()


class PlannedEvent(NamedTuple):
    """Stands for an event of a stream, as ``torch.Event``."""

    time: float

    def synchronize(self) -> None:
        """Have the host wait, whose time is not counted."""


class PlannedStreams(Streams):
    """Manages the streams of the planned accelerator."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(PLANNED, new_stream=machine.new_stream)
        self._machine = machine

    def _current(self) -> PlannedStream:
        return self._machine.current


class PlannedTransport:
    """Stands for the shared memory of ranks on one host.

    Args:
        note: called with each tensor that is sent, and ``is_gradient``.
    """

    def __init__(self, machine: Machine, note: Callable[..., object]) -> None:
        self._machine, self._note = machine, note

    def send(self, purpose: str, tensors: Mapping[int, torch.Tensor], **_unit: int) -> None:
        """Send each rank a tensor."""
        for tensor in tensors.values():
            self._note(tensor, is_gradient=purpose == "reduction")
        self._machine.send(sum(tensor.nbytes for tensor in tensors.values()))

    def expect(
        self, _purpose: str, sources: Sequence[int], like: torch.Tensor, read: Callable[[Any], Any], **_unit: int
    ) -> Pending:
        """Expect a message like a tensor from each rank; one of them is read, since all take the same memory."""
        return Pending([_Arrival(self._machine)], like, lambda: read({sources[0]: like}))


class _Arrival:
    """Is the arrival of messages of other ranks, which are sent when this rank sends its own."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._time = machine, machine.send(0)

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._machine.current.wait_until(self._time)
