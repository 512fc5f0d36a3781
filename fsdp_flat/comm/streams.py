"""The only file that knows about accelerator streams; on the CPU every method does nothing.

The order that is kept, without ``record_stream`` and without blocking the host:

* gathers run on their own stream. A gather may write its buffer (memory of the gather stream) only after
  compute has finished with what the buffer held before: :meth:`Streams.freed` records that on the compute
  stream and the next gather waits for it.
* compute waits for a gather before it uses the buffer.
* reductions run on their own stream, after the compute that made the gradients. A buffer that a reduction
  reads is kept until compute has waited for that reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["AcceleratorStreams", "Streams", "streams_for"]


class Streams:
    """The CPU twin: one queue of work, so nothing to order."""

    is_accelerator = False

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Work inside runs where gathers run, after every buffer freed so far is out of use."""
        yield

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Work inside runs where reductions run, after the compute issued so far."""
        yield

    def gathered(self) -> None:
        """Compute issued from now on comes after the gathers issued so far."""

    def reduced(self) -> None:
        """Compute issued from now on comes after the reductions issued so far."""

    def freed(self) -> None:
        """A gathered buffer is freed: compute issued so far was its last use."""

    def optimizer_ran(self) -> None:
        """Shards may have been written by compute issued so far; later gathers read them."""


class AcceleratorStreams(Streams):
    """Side streams of one accelerator for gathers and reductions."""

    is_accelerator = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gather = torch.Stream(device)
        self._reduce = torch.Stream(device)
        self._last_free: Any = None
        self._shards_ready: Any = None

    def _current(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        for event in (self._last_free, self._shards_ready):
            if event is not None:
                self._gather.wait_event(event)
        with self._gather:
            yield

    @contextmanager
    def reducing(self) -> Iterator[None]:
        self._reduce.wait_stream(self._current())
        with self._reduce:
            yield

    def gathered(self) -> None:
        self._current().wait_stream(self._gather)

    def reduced(self) -> None:
        self._current().wait_stream(self._reduce)

    def freed(self) -> None:
        self._last_free = self._current().record_event()

    def optimizer_ran(self) -> None:
        self._shards_ready = self._current().record_event()


def streams_for(device: torch.device) -> Streams:
    """The streams of a compute device."""
    return Streams() if device.type == "cpu" else AcceleratorStreams(device)
