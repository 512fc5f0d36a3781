"""Gives what a logger of a training run wants to know of a sharded model, as plain numbers."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fsdp_flat.core import Unit, no_units, units_of

# The events in which a rank communicates, or waits for it. fsdp_flat.record takes the same for exposed on CPUs.
_COMMUNICATING = {"unshard", "wait_for_unshard", "reduce_scatter", "post_backward", "root_post_backward"}


class _Meter:
    """Measures the events of a model's units.

    Attributes:
        began: when the interval began that is measured; None before the first.
        gathered_nbytes, reduced_nbytes, waited_s: bytes and seconds in it.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.gathered_nbytes = self.reduced_nbytes = 0
        self.waited_s = 0.0
        self._is_inside = False

    @contextmanager
    def measured(self, event: str, unit: Unit, block: AbstractContextManager[Any]) -> Iterator[None]:
        """Measure an event of a unit, which runs inside ``block``."""
        if event == "unshard" and unit.needs_all_gather:
            self.gathered_nbytes += unit.buffer_nbytes
        with block:
            if self._is_inside or event not in _COMMUNICATING:
                yield
                return
            self._is_inside, start = True, perf_counter()
            try:
                yield
            finally:
                self._is_inside = False
                self.waited_s += perf_counter() - start


def step_metrics(
    model: nn.Module, *, tokens: float | None = None, flop: float | None = None, peak_flops: float | None = None
) -> dict[str, float]:
    """Return numbers on the steps since the last call, for a logger of metrics. Nothing is communicated.

    Any rank may call it alone, at any interval of steps; numbers are those of this rank. The first call has the memory
    alone, and begins to measure the others; without it a step measures nothing. On an accelerator the host waits until
    the steps have ended::

        for step, batch in enumerate(batches):
            train_step(model, batch)
            if step % 10 == 0:
                wandb.log(step_metrics(model, tokens=10 * batch.numel()), step=step)

    Args:
        model: a module with units, of ``FullyShardedDataParallel`` or ``fully_shard``.
        tokens: processed since the last call.
        flop: floating-point operations of this rank since the last call, as ``planned.flops`` of :func:`plan` for each
            step: without checkpointing in the plan, as the MFU does not count what is recomputed.
        peak_flops: floating-point operations that the device can compute a second, in the dtype of compute.

    Returns:
        By name:

        * ``peak_bytes``: the most memory so far that tensors of this process had on the accelerator (reset by
          ``torch.accelerator.reset_peak_memory_stats``), or that the process had on the CPU;
        * ``reserved_bytes``: memory of the accelerator that torch's allocator holds now;
        * ``seconds``: the time since the last call;
        * ``gathered_bytes``, ``reduced_bytes``: of the unsharded parameters that were all-gathered, and of the
          unsharded gradients that were reduced;
        * ``waited_seconds``: time in which compute waited for communication;
        * ``grad_norm``: the norm before the last clipping; not of a clipping that returned a DTensor;
        * ``tokens_per_second``, ``flop_per_second``, ``mfu``: if their arguments are given.

    Raises:
        OptionError: (a ValueError) nothing at or below ``model`` is wrapped.
    """
    units = units_of(model)
    if not units:
        raise no_units(model)
    steps = list(dict.fromkeys(unit.step for unit in units))
    meter = steps[0].meter or _Meter()
    found = _memory_of(units[0].options.device)
    streams = {step.streams: None for step in steps if step.streams.is_accelerator}
    waited_s = sum(each.seconds_waited() for each in streams) if streams else meter.waited_s
    norms = [step.clipped_norm for step in steps if step.clipped_norm is not None]
    now, began = perf_counter(), meter.began
    if began is not None:
        found |= {"seconds": now - began, "waited_seconds": waited_s}
        found |= {"gathered_bytes": meter.gathered_nbytes, "reduced_bytes": meter.reduced_nbytes}
    if norms:
        found["grad_norm"] = float(norms[-1])
    if began is not None and tokens is not None:
        found["tokens_per_second"] = tokens / (now - began)
    if began is not None and flop is not None:
        found["flop_per_second"] = flop / (now - began)
        if peak_flops is not None:
            found["mfu"] = found["flop_per_second"] / peak_flops
    meter.began, meter.waited_s, meter.gathered_nbytes, meter.reduced_nbytes = now, 0.0, 0, 0
    for step in steps:
        step.meter, step.clipped_norm = meter, None
    return found


def _memory_of(device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    memory = torch.get_device_module(device)
    return {"peak_bytes": memory.max_memory_allocated(device), "reserved_bytes": memory.memory_reserved(device)}
