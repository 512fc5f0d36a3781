"""Promise: an error for lack of memory that leaves a step says what each unit holds, and what would need less."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from weakref import WeakSet

import torch

from fsdp_flat.core import Guard, Iteration, Phase, Step, Unit, cuda_memory_observer, local_of
from fsdp_flat.core.events import LOGGER
from fsdp_flat.errors import counted
from fsdp_flat.sizes import size_text

_MOST_LISTED = 8
_HEAD = "fsdp_flat: memory of the units of this rank"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator has raised an error; that of the CPU raises no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


class OutOfMemory(Guard):
    """Notes what units hold on an error for lack of memory; logs it where no step passes the error on."""

    def __init__(self) -> None:
        self._steps: WeakSet[Step] = WeakSet()
        self._observes = False

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        self._steps.add(step)
        if not self._observes and cuda_memory_observer is not None and step.root.options.device.type == "cuda":
            self._observes = True
            cuda_memory_observer(self._observe)

    def _observe(self, *_: int) -> None:
        """Log what units hold if an allocation fails between steps, as in an optimizer: no call of ours sees that."""
        steps = list(self._steps)
        if not any(unit.phase is not Phase.IDLE or unit.step.backward for step in steps for unit in step.units):
            for step in steps:
                LOGGER.error("An accelerator is out of memory, outside of a step.\n%s", memory_note(step.units))

    def step_raised(self, step: Step, error: BaseException) -> None:
        if is_out_of_memory(error) and not any(_HEAD in note for note in getattr(error, "__notes__", ())):
            add_note: Callable[[str], object] = getattr(error, "add_note", LOGGER.error)  # Python 3.10 has no notes
            add_note(memory_note(step.units))


def memory_note(units: list[Unit]) -> str:
    """Return what the units of a tree hold, what is allocated, and what would need less, with the bytes."""
    held = []
    for unit in units:
        groups = unit.param_groups
        grads = [
            local_of(param.grad) for group in groups for param in group.slots.visible_params if param.grad is not None
        ]
        shards = sum(group.storage.nbytes for group in groups)
        gathered = sum(group.output.nbytes for group in groups if group.output.owns_memory)
        held.append((unit.name, shards, sum(grad.nbytes for grad in grads), gathered, unit.buffer_nbytes))
    shards, grads_nbytes, gathered, whole = (sum(column) for column in list(zip(*held, strict=True))[1:])
    largest = sorted(held, key=lambda row: -sum(row[1:4]))[:_MOST_LISTED]
    lines = [_HEAD]
    for name, *sizes in [*largest, ("all", shards, grads_nbytes, gathered, whole)]:
        shard, grad, now, full = map(size_text, sizes)
        lines.append(f"  {name}: shard {shard}, gradient {grad}, unsharded parameters {now} of {full}")
    device, rest = units[0].options.device, "their activations"
    if device.type == "cpu":
        scale = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
        lines.append(f"  process: {size_text(peak)} at most so far; fsdp_flat.plan counts activations and states.")
    else:
        memory = torch.get_device_module(device)
        live, peak = memory.memory_allocated(device), memory.max_memory_allocated(device)
        reserved = size_text(memory.memory_reserved(device))
        lines.append(f"  {device}: {size_text(live)} in tensors, {size_text(peak)} at most so far, {reserved} reserved")
        rest = f"what activations have of {size_text(max(0, live - shards - grads_nbytes - gathered))} in other tensors"
    full_sizes = [row[4] for row in held]
    needed = full_sizes[0] + sum(sorted(full_sizes[1:])[-2:])
    largest_unit = size_text(max(full_sizes))
    return "\n".join(
        [
            *lines,
            "To need less (docs/memory.md; fsdp_flat.plan(..., fit=...) and fsdp-flat plan --batch auto compare):",
            f"  FULL_SHARD, or smaller units: {size_text(gathered)} are unsharded now; FULL_SHARD has at most "
            f"{size_text(needed)} at a time, and the largest unit {largest_unit}.",
            f"  activation checkpointing of {counted(len(units), 'units')}: all but about one unit's part of {rest}.",
            f"  CPUOffload(offload_params=True): {size_text(shards + grads_nbytes)} of shards and gradients, and what "
            f"the optimizer keeps ({size_text(2 * shards)} for Adam), which offload_optimizer takes alone.",
        ]
    )
