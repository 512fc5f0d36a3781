"""Collectives that follow NCCL's rules for streams and move nothing.

A collective runs on an internal stream of its process group, which first waits for the stream that is current at the
call; ``wait`` on its work has the current stream wait for it, and until then the work keeps the tensors alive (their
storages may be resized nevertheless). Values stay as they are. Collectives of CPU tensors run on the host at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.rehearsal.memory import MemoryRecorder
from tests.rehearsal.streams import Machine, RecordingEvent


class FakeWork:
    """Stands for the ``Work`` of a collective under way."""

    def __init__(self, machine: Machine, event: RecordingEvent | None, tensors: list[torch.Tensor]) -> None:
        self._machine = machine
        self._event = event
        self._tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        """Have the current stream wait for the collective."""
        if self._event is not None:
            self._machine.current.wait_event(self._event)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        """Say whether the host already comes after it."""
        return self._event is None or self._event.query()


class FakeCollectives:
    """Imitates functions of ``torch.distributed``.

    Args:
        machine: the streams.
        recorder: notes reads and writes.
    """

    def __init__(self, machine: Machine, recorder: MemoryRecorder) -> None:
        self._machine = machine
        self.recorder = recorder

    def _begin(
        self, name: str, group: Any, is_async: bool, reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> FakeWork | None:
        group = group or dist.group.WORLD
        if not all(map(self.recorder.is_on_device, (*reads, *writes))):
            self.recorder.check_devices(name, [*reads, *writes])
            self.recorder.note(name, self._machine.host, reads, writes)
            work = FakeWork(self._machine, None, [])
        else:
            stream = self._machine.stream_of_group(group, f"group {dist.get_process_group_ranks(group)}")
            stream.wait_stream(self._machine.current)
            self.recorder.note(name, stream, reads, writes)
            work = FakeWork(self._machine, stream.record_event(), [*reads, *writes])
        if is_async:
            return work
        work.wait()
        return None

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Read ``input``, write ``output``."""
        return self._begin("all_gather_single", group, async_op, [input], [output])

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """Read ``input``, write ``output``."""
        return self._begin("reduce_scatter_single", group, async_op, [input], [output])

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        """Read and write ``tensor``."""
        return self._begin("all_reduce", group, async_op, [], [tensor])

    def broadcast(
        self, tensor: torch.Tensor, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
    ) -> Any:
        """Write ``tensor``."""
        return self._begin("broadcast", group, async_op, [], [tensor])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Read ``input``, write ``output``."""
        return self._begin("all_to_all_single", group, async_op, [input], [output])

    def waits(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Imitate a function that makes the host wait: it moves objects, or all ranks wait for each other."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._machine.synchronize(name)
            return original(*args, **kwargs)

        return call

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the placeholders for functions of ``torch.distributed``, by name."""
        return {
            "all_gather_single": self.all_gather_single,
            "all_gather_into_tensor": self.all_gather_single,
            "reduce_scatter_single": self.reduce_scatter_single,
            "reduce_scatter_tensor": self.reduce_scatter_single,
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
            "all_to_all_single": self.all_to_all_single,
        }
