"""Patches the recording streams and the fake accelerator into the library: the only file that names its internals.

* ``fsdp_flat.core.step.Streams`` manages the streams of a tree. Here they are recording streams, created in
  the order in which a step first uses them.
* ``fsdp_flat.runtime.construction.default_device`` returns the accelerator.
* ``fsdp_flat.comm.torch_comm`` holds aliases of two functions of ``torch.distributed``.
* ``fsdp_flat.core.buffers.swap_memory`` moves memory from one storage to another, which no operation shows.
* :func:`gathering_units` watches the two methods of a unit that begin and end its all-gather.
* :func:`names_of_storages`, :func:`unsharded_buffers` and :func:`num_unsharded` ask units for their handles, shards,
  unsharded buffers and flat gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fsdp_flat.core.buffers
import fsdp_flat.core.step
import fsdp_flat.runtime.construction
from fsdp_flat.comm import Pending, torch_comm
from fsdp_flat.comm.streams import Streams
from fsdp_flat.core import Unit, units_of
from tests.rehearsal.fake_collectives import FakeCollectives
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.streams import Machine


@contextmanager
def installed(machine: Machine, collectives: FakeCollectives) -> Iterator[None]:
    """Have models that are wrapped and run inside the block use the recording streams and collectives."""
    functions = collectives.functions()
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(fsdp_flat.core.step, "Streams", functools.partial(Streams, new_stream=machine.new_stream))
        replace(fsdp_flat.runtime.construction, "default_device", lambda *_, **__: (DEVICE, False))
        for owner in (dist, torch_comm):
            for name, function in functions.items():
                if hasattr(owner, name):
                    replace(owner, name, function)
        for name in ("all_gather_object", "broadcast_object_list", "barrier", "monitored_barrier"):
            replace(dist, name, collectives.waits(name, getattr(dist, name)))
        swap = fsdp_flat.core.buffers.swap_memory
        if swap is not None:
            watched = functools.partial(collectives.recorder.swap_storages, swap)
            replace(fsdp_flat.core.buffers, "swap_memory", watched)
        yield


def names_of_storages(model: nn.Module) -> dict[int, str]:
    """Return names of the storages of a wrapped model, by their ``_cdata``."""
    names: dict[int, str] = {}

    def add(tensor: torch.Tensor | None, name: str) -> None:
        if tensor is not None:
            names.setdefault(tensor.untyped_storage()._cdata, name)

    for unit in units_of(model):
        for handle in unit.param_groups:
            add(handle.flat_param.data, f"the shard of {unit.name!r}")
            add(handle.flat_param.grad, f"the sharded gradient of {unit.name!r}")
            for dtype, output in handle.storage.outputs.items():
                add(output.tensors[0], f"the unsharded buffer of {unit.name!r} in {dtype}")
            for window in (handle.grads.waiting, handle.grads._spare_buffer):
                if window is not None:
                    add(window.tensor, f"the flat gradient of {unit.name!r}")
    return names


@contextmanager
def gathering_units() -> Iterator[list[str]]:
    """Provide the names of units whose all-gathers begin or end at the moment, the innermost last, inside the block."""
    names: list[str] = []

    def noting(method: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def run(unit: Unit) -> None:
            names.append(unit.name)
            try:
                method(unit)
            finally:
                names.pop()

        return run

    with (
        mock.patch.object(Unit, "gather", noting(Unit.gather)),
        mock.patch.object(Unit, "wait", noting(Unit.wait)),
    ):
        yield names


def unsharded_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return the unsharded buffers of a wrapped model, with or without memory."""
    return [handle.output.tensors[0] for unit in units_of(model) for handle in unit.param_groups]


def num_unsharded(units: Sequence[Unit]) -> int:
    """Return how many of ``units`` have memory for unsharded parameters, apart from their shards."""
    return sum(
        any(handle.output.owns_memory and handle.output.nbytes for handle in unit.param_groups) for unit in units
    )


# Findings that mention this are about asking which parameters any rank used, which a rank with unused ones has to.
USED_PARAMETERS = "fsdp_flat/runtime/backward_exchange.py"


def _nothing(_streams: Streams, *_args: object) -> None:
    pass


def _no_wait(pending: Pending) -> torch.Tensor:
    return pending.result


def _reduce_at_once(streams: Streams) -> Any:
    if streams._reduce_scatter is None:
        streams._reduce_scatter = streams._new_stream(streams._device)
    return streams._reduce_scatter


def _gather_at_once(streams: Streams) -> Any:
    if streams._all_gather is None:
        streams._all_gather = streams._new_stream(streams._device)
    return streams._all_gather


# By name, a defect and how it is planted: class, method, and replacement.
PLANTED: dict[str, tuple[type, str, Any]] = {
    "compute does not wait for all-gathers": (Streams, "wait_for_all_gathers", _nothing),
    "compute does not wait for reduce-scatters": (Streams, "wait_for_reduce_scatters", _nothing),
    "a freed buffer is not announced": (Streams, "buffers_freed", _nothing),
    "the optimizer is not announced": (Streams, "shards_written", _nothing),
    "reduce-scatters do not wait for compute": (Streams, "_enter_reduce_scatters", _reduce_at_once),
    "all-gathers do not wait for events": (Streams, "_enter_all_gathers", _gather_at_once),
    "collectives are not waited for": (Pending, "wait", _no_wait),
}


@contextmanager
def planted(defect: str) -> Iterator[None]:
    """Give the library a defect of :data:`PLANTED` inside the block."""
    owner, method, replacement = PLANTED[defect]
    with mock.patch.object(owner, method, replacement):
        yield
