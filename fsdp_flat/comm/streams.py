"""Orders asynchronous work on accelerator streams, and defines its profiler and autograd contexts.

No other file uses streams. On the CPU no ordering is needed.

All units of a tree share one object. It ensures this order, without ``record_stream`` and without blocking the host:

* all-gathers run on a separate stream. An all-gather may take memory (of the all-gather stream) only after compute has
  finished with the former content: :meth:`Streams.buffers_freed` notes the last use of freed memory, and the next
  all-gather waits for it. A unit frees its buffer after the next unit's all-gather has taken memory, so that this
  all-gather waits for no compute of the unit before.
* an all-gather that is not in place begins on a stream of its own, in staging memory of that stream, which no compute
  uses: it waits for no compute. The copies from there to the buffers run on the all-gather stream.
* every all-gather waits for the optimizer: :meth:`Streams.optimizer_stepped` and :meth:`Streams.shards_written`.
* compute waits for an all-gather before it uses the buffer.
* reduce-scatters run on a separate stream, after the compute that produced the gradients. A buffer that a
  reduce-scatter reads is kept until compute has waited for that reduce-scatter.
* copies to the host go into pinned memory. The host waits for them once, at the end of a backward, because an optimizer
  on the CPU reads them next.
* what is on the host between two uses (activations, optimizer states) is copied on a stream for each direction
  (:class:`HostSwap`). Its memory on the accelerator is given back once compute has waited for the copy to the host.
* a save in the background copies shards and states on a stream of its own (:class:`HostCopies`); compute waits for the
  copies, and the thread that writes them, but not the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fsdp_flat.comm.torch_comm import profiler_is_on, transforms_are_active, unseen_by_transforms

NOTHING: AbstractContextManager[Any] = nullcontext()
# Priority of streams: their small kernels, which collectives wait for, run before the compute that is queued.
_FIRST = -1
_BLOCK_NBYTES = 1 << 26
# In a block each tensor begins at a multiple of this.
_ALIGNMENT = 64
# While the time of waits is measured: so many may be under way on the accelerator before the host waits for the first.
_MOST_WAITS = 1024
# The device of tensors that stand for those of an accelerator where a plan runs a step on tensors without memory: they
# take torch's operators of the CPU, and are told from tensors of the host by the index, which no real one has.
PLANNED = torch.device("cpu", 0)


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is no CPU, so that streams order its work; a planned one is none either."""
    return device.type != "cpu" or device.index is not None


class Streams:
    """Manages the all-gather stream and the reduce-scatter stream, made by ``new_stream``, of an accelerator.

    On the CPU, which runs all work in order, it does nothing.

    Attributes:
        all_gathers: context in which work runs on the all-gather stream, after the last use of every buffer freed so
            far and after the shards are written: it may take memory.
        staged_all_gathers: context in which work runs on the staging stream, after the copies from staging memory that
            is freed and after the shards are written: it may take memory that only :attr:`all_gathers` reads.
        ends_of_all_gathers: context in which work runs on the all-gather stream and takes no memory.
        reduce_scatters: context in which work runs on the reduce-scatter stream, after the compute issued so far.
    """

    def __init__(self, device: torch.device, *, new_stream: Callable[..., Any] = torch.Stream) -> None:
        self.is_accelerator = is_accelerator(device)
        self._device = device
        self._new_stream = new_stream
        # Created on first use: most units use the streams of their tree, not the ones that they were built with.
        self._all_gather: Any = None
        self._staging: Any = None
        self._reduce_scatter: Any = None
        # Events that these two have not waited for yet: the last uses of freed memory, and the last write of shards.
        self._last_uses: list[Any] = []
        self._shards_ready: Any = None
        self._staging_read: Any = None
        self._held_staging: tuple[Any, object] | None = None
        self._staging_shards_ready: Any = None
        self._post_optim_event: Any = None
        self._host_copies: Any = None
        self._host_reads: Any = None
        self._kept_blocks: list[torch.Tensor] = []
        self._save_swap: HostSwap | None = None
        self._swap: HostSwap | None = None
        self._measures_waits = False
        # Events before and after each wait of compute that is not in the sum yet.
        self._waits: deque[tuple[Any, Any]] = deque()
        self._waited_s = 0.0
        self.all_gathers: AbstractContextManager[Any] = NOTHING
        self.staged_all_gathers: AbstractContextManager[Any] = NOTHING
        self.ends_of_all_gathers: AbstractContextManager[Any] = NOTHING
        self.reduce_scatters: AbstractContextManager[Any] = NOTHING
        if self.is_accelerator:
            inside_all_gathers: list[Any] = []
            self.all_gathers = _StreamContext(self._enter_all_gathers, inside_all_gathers)
            self.staged_all_gathers = _StreamContext(self._enter_staged_all_gathers, [])
            self.ends_of_all_gathers = _StreamContext(self._all_gather_stream, inside_all_gathers)
            self.reduce_scatters = _StreamContext(self._enter_reduce_scatters, [])

    def _current(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    def _all_gather_stream(self) -> Any:
        if self._all_gather is None:
            self._all_gather = self._new_stream(self._device, priority=_FIRST)
        return self._all_gather

    def _enter_all_gathers(self) -> Any:
        stream = self._all_gather_stream()
        for event in self._last_uses:
            stream.wait_event(event)
        self._last_uses.clear()
        if self._shards_ready is not None:
            stream.wait_event(self._shards_ready)
        self._shards_ready = None
        return stream

    def _enter_staged_all_gathers(self) -> Any:
        if self._staging is None:
            self._staging = self._new_stream(self._device, priority=_FIRST)
        for event in (self._staging_read, self._staging_shards_ready):
            if event is not None:
                self._staging.wait_event(event)
        self._staging_read = self._staging_shards_ready = None
        return self._staging

    def _enter_reduce_scatters(self) -> Any:
        if self._reduce_scatter is None:
            self._reduce_scatter = self._new_stream(self._device, priority=_FIRST)
        self._reduce_scatter.wait_stream(self._current())
        return self._reduce_scatter

    def wait_for_all_gathers(self) -> None:
        """Order compute issued from now on after the all-gathers issued so far."""
        if self._all_gather is not None:
            self._wait_for(self._all_gather)

    def wait_for_reduce_scatters(self) -> None:
        """Order compute issued from now on after the reduce-scatters issued so far."""
        if self._reduce_scatter is not None:
            self._wait_for(self._reduce_scatter)

    def _wait_for(self, stream: Any) -> None:
        current = self._current()
        if not self._measures_waits:
            current.wait_stream(stream)
            return
        before, after = [torch.Event(self._device, enable_timing=True) for _ in range(2)]
        current.record_event(before)
        current.wait_stream(stream)
        current.record_event(after)
        self._waits.append((before, after))
        if len(self._waits) > _MOST_WAITS:
            self._add_wait()

    def _add_wait(self) -> None:
        before, after = self._waits.popleft()
        after.synchronize()
        self._waited_s += before.elapsed_time(after) / 1e3

    def seconds_waited(self) -> float:
        """Return how long compute has waited for communication since the last call; the first begins to measure.

        It blocks the host until the accelerator has ended the waits issued so far.
        """
        self._measures_waits = True
        while self._waits:
            self._add_wait()
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def last_use(self) -> Any:
        """Return an event after the compute issued so far, for :meth:`buffers_freed`; None on the CPU."""
        return self._current().record_event() if self.is_accelerator else None

    def buffers_freed(self, last_use: Any = None) -> None:
        """Note that unsharded buffers are freed, of which ``last_use``, or compute issued so far, was the last use."""
        if self.is_accelerator:
            self._last_uses.append(last_use or self._current().record_event())

    def hold_staging(self, memory: object) -> None:
        """Hold staging memory, which copies issued inside :attr:`all_gathers` so far read, until :meth:`free_staging`.

        An all-gather that takes memory before that does not wait for these copies.
        """
        self.free_staging()
        self._held_staging = self._all_gather.record_event(), memory

    def free_staging(self) -> None:
        """Free staging memory that is held."""
        if self._held_staging is not None:
            self._staging_read, self._held_staging = self._held_staging[0], None

    def shards_written(self) -> None:
        """Record that compute issued so far may have written shards, which later all-gathers read."""
        if self.is_accelerator:
            self._shards_ready = self._staging_shards_ready = self._current().record_event()

    def optimizer_stepped(self) -> None:
        """Record, at the begin of an iteration, that an optimizer may have written shards in compute issued so far."""
        event, self._post_optim_event = self._post_optim_event, None
        if event is None:
            self.shards_written()
        else:
            self._shards_ready = self._staging_shards_ready = event

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next :meth:`optimizer_stepped` take ``event``, recorded after the optimizer, for the last write."""
        if self.is_accelerator:
            self._post_optim_event = event

    @contextmanager
    def also_on(self, stream: Any) -> Iterator[None]:
        """Make ``stream``, if given, current inside the block, between earlier and later work of the current one."""
        if stream is None or not self.is_accelerator:
            yield
            return
        outer = self._current()
        stream.wait_stream(outer)
        with stream:
            yield
        outer.wait_stream(stream)

    def copy_to(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Copy ``tensor`` to a device and dtype, for use after :meth:`wait_for_host_copies`."""
        if is_accelerator(device) or not is_accelerator(tensor.device):
            return tensor.to(device=device, dtype=dtype, non_blocking=self.is_accelerator)
        narrow = tensor.to(dtype)
        copy = torch.empty(tensor.shape, dtype=dtype, device=device, pin_memory=True)
        copy.copy_(narrow, non_blocking=True)
        self._host_copies = self._current().record_event()
        return copy

    def host_copies(self) -> HostCopies:
        """Return copies of the tree's tensors on the host, for one save; memory is kept as long as this object."""
        self._save_swap = self._save_swap or self._new_swap()
        return HostCopies(self._save_swap, self._kept_blocks)

    @property
    def swap(self) -> HostSwap:
        """Copies to the host and back of what the accelerator does not hold between two uses."""
        self._swap = self._swap or self._new_swap()
        return self._swap

    def _new_swap(self) -> HostSwap:
        return HostSwap(self._device, self._new_stream, self._current)

    def shards_read(self) -> None:
        """Record, where an all-gather begins, that copies issued so far read shards on the host."""
        self._host_reads = self._current().record_event()

    def wait_for_host_copies(self) -> None:
        """Block the host until copies of :meth:`copy_to`, and from shards before :meth:`shards_read`, are complete."""
        events = (self._host_copies, self._host_reads)
        self._host_copies = self._host_reads = None
        for event in events:
            if event is not None:
                event.synchronize()


class HostCopies:
    """Copies tensors to the host without a wait, into pinned memory that belongs to these copies until :meth:`release`.

    Then it is ``kept``, a list that may be common to several such objects, for the next copies of any. Copies run on
    the stream of a ``swap``. As much memory is kept as the last copies took, in blocks of 64 MiB, and one of its own
    for a larger tensor: torch rounds pinned memory up to a power of two.
    """

    def __init__(self, swap: HostSwap, kept: list[torch.Tensor]) -> None:
        self._swap, self._kept = swap, kept
        self._complete: Any = None
        self._sources: Sequence[torch.Tensor] = ()
        self._blocks: list[torch.Tensor] = []

    def copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the host, to be read after :meth:`wait` and until :meth:`release`.

        Work issued to the current stream from now on runs after the copies, so that it may overwrite the tensors.
        """
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return [tensor.to("cpu", copy=True) for tensor in tensors]
        places = self._places(tensors)
        self._complete = self._swap.begin_to_host(tensors, places)
        self._swap.wait(self._complete)
        # Their memory must not be given back to another stream before.
        self._sources = tensors
        return places

    def _places(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return pinned memory for each tensor, from the kept blocks in their order as far as these suffice."""
        kept = self._kept[:]
        self._kept.clear()
        found, used = list[torch.Tensor](), 0
        for tensor in tensors:
            if not self._blocks or used + tensor.nbytes > self._blocks[-1].numel():
                nbytes = max(tensor.nbytes, _BLOCK_NBYTES)
                at = next((at for at, block in enumerate(kept) if block.numel() == nbytes), None)
                fresh = None if at is not None else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                self._blocks.append(kept.pop(at) if at is not None else fresh)  # type: ignore[arg-type]
                used = 0
            place = self._blocks[-1][used : used + tensor.nbytes]
            found.append(place.view(tensor.dtype).view(tensor.shape))
            used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    def wait(self) -> None:
        """Block the host until the last copies are complete."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete.synchronize()
        self._sources = ()

    def release(self) -> None:
        """Keep the memory for other copies: these are complete, and nobody reads them any more."""
        if self._blocks:
            self._kept[:], self._blocks = self._blocks, []


class HostSwap:
    """Copies tensors to pinned host memory and back, on a stream for each direction, beside compute.

    The host waits for nothing. A copy is complete for work that follows :meth:`wait` on its event.
    """

    def __init__(
        self, device: torch.device, new_stream: Callable[[torch.device], Any], current: Callable[[], Any]
    ) -> None:
        self._device = device
        self._new_stream = new_stream
        self._current = current
        self._to_host: Any = None
        self._to_device: Any = None

    def place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory for a copy of ``tensor`` (contiguous)."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def begin_to_host(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Any:
        """Begin to copy tensors (contiguous) to ``places`` on the host, after the work issued so far.

        The caller keeps the tensors, and does not change them, until the current stream has waited for the event.

        Returns:
            The event after the copies.
        """
        self._to_host = self._to_host or self._new_stream(self._device)
        self._to_host.wait_stream(self._current())
        with self._to_host:
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
        return self._to_host.record_event()

    def begin_to_device(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Begin to copy tensors of :meth:`begin_to_host`, for which the current stream has waited, to the accelerator.

        Returns:
            The tensors on the accelerator, in new memory, and the event after the copies, for which the current stream
            has to wait.
        """
        self._to_device = self._to_device or self._new_stream(self._device)
        # The memory may have served work that was issued before.
        made = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in tensors]
        self._to_device.wait_stream(self._current())
        with self._to_device:
            for target, tensor in zip(made, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
        return made, self._to_device.record_event()

    def wait(self, event: Any) -> None:
        """Order work issued to the current stream from now on after an event of these copies."""
        self._current().wait_event(event)

    def block(self, event: Any) -> None:
        """Block the host until an event of these copies, before it reads what they have written."""
        event.synchronize()


class _StreamContext:
    """Makes the stream that ``enter`` orders after earlier work current inside a reusable and reentrant context.

    Contexts of one stream share the list ``entered``, so that one may be entered inside another.
    """

    def __init__(self, enter: Callable[[], Any], entered: list[Any]) -> None:
        self._enter = enter
        self._entered = entered

    def __enter__(self) -> None:
        # torch 2.11 raises if a stream's context is entered inside itself.
        stream = None if self._entered else self._enter()
        self._entered.append(stream)
        if stream is not None:
            stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        stream = self._entered.pop()
        if stream is not None:
            stream.__exit__(*error)


def profiled(operation: str, unit_name: str) -> AbstractContextManager[Any]:
    """Label work inside the block in profiler traces as FSDP does, for example ``FSDP::all_gather (blocks.0)``.

    Without a running profiler it costs one check.
    """
    return record_function(f"FSDP::{operation} ({unit_name})") if profiler_is_on() else NOTHING


def unrecorded() -> AbstractContextManager[Any]:
    """Disable autograd and inference mode, where they are on, inside the block: results are ordinary tensors."""
    if torch.is_inference_mode_enabled():
        return _out_of_inference_mode()
    return torch.no_grad() if torch.is_grad_enabled() else NOTHING


def untransformed() -> AbstractContextManager[Any]:
    """Hide an all-gather inside the block from a transform of ``torch.func``, if one is running."""
    return unseen_by_transforms() if transforms_are_active() else NOTHING


@contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
