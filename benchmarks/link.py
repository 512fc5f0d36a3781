"""Emulates the link between GPUs on one of them: collectives in the order issued, each taking bytes / bandwidth.

This process is rank 0 of a simulated group. As with NCCL, all collectives of the group run on one stream of their own,
one after another. Each waits for what the current stream has been given when it is called, and ``wait()`` makes the
stream that is current then wait for it; the host waits for nothing. A collective is a copy, so that values stay finite,
and then a kernel that spins for the time of its bytes on the link. A spinning kernel takes one multiprocessor and no
memory bandwidth, of which real collectives take some; the copies take the memory bandwidth of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_flat.comm import torch_comm

_ALL_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


class Moment(NamedTuple):
    """Stands for an event on the CPU: ``seconds`` of simulated time at which a stream reached it."""

    seconds: float

    def query(self) -> bool:
        """Return True: work on the CPU is done when it is issued."""
        return True


class HostStream:
    """Stands for a stream on the CPU: work issued so far ends at ``seconds`` of simulated time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record_event(self) -> Moment:
        """Return the end of everything issued so far."""
        return Moment(self.seconds)

    def wait_event(self, event: Moment) -> None:
        """Start later work after ``event``."""
        self.seconds = max(self.seconds, event.seconds)


class HostStreams:
    """Makes streams on the CPU, and says which is current."""

    def __init__(self) -> None:
        self.current = HostStream()

    def new(self) -> HostStream:
        """Return a new stream."""
        return HostStream()

    def current_stream(self) -> HostStream:
        """Return the stream on which work is issued."""
        return self.current

    def on(self, stream: HostStream) -> AbstractContextManager[Any]:
        """Make a stream current inside the block."""
        return mock.patch.object(self, "current", stream)

    def spin(self, seconds: float) -> None:
        """Keep the current stream busy for some seconds."""
        self.current.seconds += seconds


class CudaStreams:
    """Makes streams of a CUDA device.

    Args:
        device: the device, on which nothing else runs now: its cycles per second are measured.
    """

    _CYCLES = 20_000_000

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The only kernel in torch that takes a time and no bandwidth is private; torch's own tests use it likewise.
        self._spin: Callable[[int], None] = torch.cuda._sleep
        self._spin(self._CYCLES)  # the first call loads the kernel, and the clock of an idle GPU rises
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._spin(self._CYCLES)
        end.record()
        end.synchronize()
        self.cycles_per_s = self._CYCLES / (start.elapsed_time(end) / 1e3)

    def new(self) -> Any:
        """Return a new stream, of the priority of NCCL's."""
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Any:
        """Return the stream on which work is issued."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream current inside the block."""
        return torch.cuda.stream(stream)

    def spin(self, seconds: float) -> None:
        """Keep the current stream busy for some seconds."""
        self._spin(int(seconds * self.cycles_per_s))


class LinkWork:
    """Stands for an issued collective, as the work that NCCL's collectives return."""

    def __init__(self, streams: Any, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._streams, self._event = streams, event
        # Kept until a stream waits, as NCCL does: else their memory could be taken while the link uses it.
        self._tensors: Sequence[torch.Tensor] = tensors

    def wait(self, *_: Any) -> bool:
        """Make the current stream wait; the host does not."""
        self._streams.current_stream().wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended."""
        return bool(self._event.query())


class Link:
    """Carries the collectives of rank 0 of ``world`` simulated ranks.

    Args:
        world: number of ranks.
        gbps: bandwidth in 1e9 bytes a second; None for a link that takes no time.
        streams: :class:`CudaStreams` or :class:`HostStreams`.
        copies: fill buffers, so that values stay finite.

    Attributes:
        stream: the stream of all collectives.
        nbytes: bytes carried so far.
    """

    def __init__(self, world: int, gbps: float | None, streams: Any, *, copies: bool = True) -> None:
        self._world, self._gbps, self._streams, self.copies = world, gbps, streams, copies
        self.stream = streams.new()
        self.nbytes = 0.0

    def all_gather(self, *args: Any, **kwargs: Any) -> LinkWork | None:
        """Fill a full buffer from this rank's shard."""
        output, own = _tensors(args, kwargs)
        rows = output.view(self._world, -1)

        def copy() -> None:
            # The local shard may be the first row itself.
            if own.data_ptr() != output.data_ptr():
                rows[0].copy_(own)
            rows[1:].copy_(own)

        return self._carry(copy, output, own, full=output, is_async=_is_async(kwargs))

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> LinkWork | None:
        """Take this rank's part of a full buffer."""
        output, whole = _tensors(args, kwargs)

        def copy() -> None:
            output.copy_(whole[: output.numel()])

        return self._carry(copy, output, whole, full=whole, is_async=_is_async(kwargs))

    def nothing(self, *_: Any, **__: Any) -> LinkWork:
        """Stand for a collective whose output is not read."""
        return LinkWork(self._streams, self.stream.record_event(), ())

    def _carry(
        self, copy: Callable[[], None], *tensors: torch.Tensor, full: torch.Tensor, is_async: bool
    ) -> LinkWork | None:
        nbytes = full.numel() * full.element_size() * (self._world - 1) / self._world
        self.nbytes += nbytes
        self.stream.wait_event(self._streams.current_stream().record_event())
        with self._streams.on(self.stream):
            copy()
            if self._gbps is not None:
                self._streams.spin(nbytes / (self._gbps * 1e9))
        work = LinkWork(self._streams, self.stream.record_event(), tensors)
        if is_async:
            return work
        work.wait()
        return None


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and input of a collective, flattened, under the argument names of any torch version."""
    values = [*args, *(kwargs[name] for name in ("output", "output_tensor", "input", "input_tensor") if name in kwargs)]
    return values[0].view(-1), values[1].view(-1)


def _is_async(kwargs: Mapping[str, Any]) -> bool:
    """Return ``async_op``, which no library passes by position."""
    return bool(kwargs.get("async_op", False))


@contextmanager
def pretended(world: int, link: Link | None = None) -> Iterator[Link]:
    """Make this process rank 0 of ``world`` simulated ranks inside the block, whose collectives run on ``link``.

    Those of torch's fake backend, which carries all others, launch one copy per rank and leave the result of a
    reduction undefined.

    Args:
        world: number of ranks.
        link: by default one on the CPU that takes no time.
    """
    link = Link(world, None, HostStreams()) if link is None else link
    functions = dict.fromkeys(_ALL_GATHERS, link.all_gather) | dict.fromkeys(_REDUCE_SCATTERS, link.reduce_scatter)
    if not link.copies:
        functions = dict.fromkeys((*functions, "all_gather"), link.nothing)  # the last is that of torch's FSDP1 on CPUs
    with ExitStack() as stack:
        for owner in (dist, torch_comm):
            for name in filter(partial(hasattr, owner), functions):
                stack.enter_context(mock.patch.object(owner, name, functions[name]))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        stack.callback(dist.destroy_process_group)
        yield link
