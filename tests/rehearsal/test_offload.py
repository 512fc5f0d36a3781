"""Activations and optimizer states on the host: copies are ordered, run beside compute, and do not stop the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_flat import CPUOffload, offload_activations, offload_optimizer
from fsdp_flat.comm import HostSwap
from fsdp_flat.composable import trace
from tests.rehearsal.kit import Rehearsal, batch, rehearsal, train
from tests.rehearsal.memory import is_issued_by_library
from tests.rehearsal.models import BOTH_KINDS, LOW, Checkpointed, on_device
from tests.rehearsal.streams import Clock, Queue, Stamp, is_ordered
from tests.rehearsal.test_fully_shard import LocalUpdates, sharded
from tests.support.kit import Stack

DEEP = functools.partial(Stack, 6)
TO_HOST, TO_DEVICE = "to the host", "to the accelerator"


@dataclass(slots=True)
class _Op:
    """Describes an operation: during the forward or backward of a unit with number ``run``, ordered after ``clock``."""

    run: int
    stamp: Stamp
    clock: Clock


@dataclass
class Copies:
    """Records the copies between host and accelerator, and the compute beside them.

    Attributes:
        runs: the forwards and backwards of units.
        compute: the last operation of compute in each of them.
    """

    runs: list[str] = field(default_factory=list)
    found: list[tuple[str, _Op]] = field(default_factory=list)
    compute: dict[int, _Op] = field(default_factory=dict)

    def count(self, way: str) -> int:
        return sum(each == way for each, _ in self.found)

    def exposed(self) -> list[str]:
        """Return a text for each copy that compute issued in the same run waits for, or that waits for it."""
        found = []
        for way, copy in self.found:
            last = self.compute.get(copy.run)
            if last is not None and is_ordered(copy.stamp, last.clock):
                found.append(f"{self.runs[copy.run]} waits for a copy {way}")
            if last is not None and way == TO_DEVICE and is_ordered(last.stamp, copy.clock):
                found.append(f"a copy {way} waits for {self.runs[copy.run]}")
        return list(dict.fromkeys(found))


@contextmanager
def watched(run: Rehearsal, model: nn.Module) -> Iterator[Copies]:
    """Record the copies of steps inside the block."""
    copies, position, record = Copies(), 0, run.recorder.note
    with trace(model) as events:

        def note(op: str, queue: Queue, reads: Any = (), writes: Any = ()) -> None:
            nonlocal position
            record(op, queue, reads, writes)
            for event, name in events[position:]:
                if event in ("pre_forward", "pre_backward"):
                    copies.runs.append(f"the {event.removeprefix('pre_')} of {name!r}")
            position = len(events)
            done = _Op(len(copies.runs) - 1, (queue.id, queue.clock[queue.id]), dict(queue.clock))
            way = next((way for way in (TO_HOST, TO_DEVICE) if op.endswith(way)), None)
            if way is not None:
                copies.found.append((way, done))
            elif queue is run.machine.compute and not is_issued_by_library():
                copies.compute[done.run] = done

        run.recorder.note = note  # type: ignore[method-assign]
        try:
            yield copies
        finally:
            del run.recorder.note  # type: ignore[method-assign]


def offloading_step(model: nn.Module, **kwargs: Any) -> None:
    with offload_activations(model, **{"min_nbytes": 0, **kwargs}):
        loss = model(batch()).float().pow(2).mean()
    loss.backward()


def train_offloading(
    model: nn.Module, num_steps: int, optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
) -> None:
    optimizer_ = optimizer(model.parameters())
    for _ in range(num_steps):
        offloading_step(model)
        optimizer_.step()
        optimizer_.zero_grad()


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "low precision": {"mixed_precision": LOW},
    "a memory budget": {"sharding_strategy": "FULL_SHARD:2kB"},
    "optimizer states too": {"cpu_offload": CPUOffload(offload_optimizer=True)},
}


@BOTH_KINDS
@pytest.mark.parametrize("name", OPTIONS)
def test_copies_of_activations_are_ordered_and_do_not_stop_the_host(name: str, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(DEEP), use_orig_params=use_orig_params, **OPTIONS[name])
        train_offloading(model, 3)
    run.check()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_hooks", "reentrant"])
def test_copies_of_the_inputs_of_recomputed_modules_are_ordered(use_reentrant: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(lambda: Checkpointed(use_reentrant)))
        train_offloading(model, 2)
        with watched(run, model) as copies:
            offloading_step(model, keep=0)
    run.check()
    assert copies.count(TO_HOST) == copies.count(TO_DEVICE) > 0


def test_copies_of_fully_shard_are_ordered() -> None:
    with rehearsal() as run:
        model = sharded(run, DEEP)
        train_offloading(model, 3, LocalUpdates)
    run.check()


@BOTH_KINDS
def test_copies_of_activations_run_beside_the_compute_of_a_unit(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(DEEP), use_orig_params=use_orig_params)
        offloading_step(model)
        with watched(run, model) as copies:
            for _ in range(2):
                offloading_step(model)
    # Of six blocks the first and the last keep what they save: the input, and the output of tanh.
    assert copies.count(TO_HOST) == copies.count(TO_DEVICE) == 2 * 4 * 2
    assert copies.exposed() == []


def test_copies_that_compute_waits_for_at_once_are_found() -> None:
    def waiting(swap: HostSwap, tensors: Any, places: Any) -> Any:
        event = begin(swap, tensors, places)
        swap.wait(event)
        return event

    begin = HostSwap.begin_to_host
    with rehearsal() as run, mock.patch.object(HostSwap, "begin_to_host", waiting):
        model = run.wrap(on_device(DEEP))
        with watched(run, model) as copies:
            offloading_step(model)
    assert any("waits for a copy to the host" in text for text in copies.exposed())


@BOTH_KINDS
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, functools.partial(torch.optim.AdamW, foreach=True)])
def test_optimizer_states_are_on_the_host_between_steps_and_copies_are_ordered(
    optimizer: Any, use_orig_params: bool
) -> None:
    made: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        made.append(optimizer(params))
        return made[-1]

    with rehearsal() as run:
        model = run.wrap(
            on_device(DEEP), use_orig_params=use_orig_params, cpu_offload=CPUOffload(offload_optimizer=True)
        )
        train(run, model, num_steps=3, optimizer=make)
        assert devices_of(made[0]) == {run.machine.device.type}
        model(batch())
        assert devices_of(made[0]) == {"cpu"}
    run.check()


def devices_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the types of the devices of an optimizer's states with several elements."""
    found = [value for of_param in optimizer.state.values() for value in of_param.values()]
    return {value.device.type for value in found if isinstance(value, torch.Tensor) and value.numel() > 1}


def test_copies_of_states_to_the_host_run_until_the_next_forward() -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(DEEP))
        optimizer = torch.optim.AdamW(model.parameters())
        offload_optimizer(optimizer)
        model(batch()).float().pow(2).mean().backward()
        with watched(run, model) as copies:
            optimizer.step()
            torch.zeros(1, device=run.machine.device).add_(1.0)
            after_step = dict(run.machine.compute.clock)
            model(batch()).float().pow(2).mean().backward()
    assert copies.count(TO_HOST) > 0
    assert not any(is_ordered(copy.stamp, after_step) for way, copy in copies.found if way == TO_HOST)
    assert all(is_ordered(copy.stamp, run.machine.compute.clock) for _, copy in copies.found)
    run.check()


@pytest.mark.parametrize("end", ["backward", "an error", "no backward"])
def test_states_leave_unit_by_unit_during_the_next_forward(end: str) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(DEEP))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        offload_optimizer(optimizer)
        model(batch()).float().pow(2).mean().backward()
        at_units: list[set[str]] = []
        with watched(run, model) as copies:
            hooks = [
                block.register_forward_hook(lambda *_: at_units.append(devices_of(optimizer)))
                for block in model.module.blocks
            ]
            optimizer.step()
            if end == "an error":
                hooks.append(model.module.head.register_forward_pre_hook(_fail))
                with pytest.raises(ArithmeticError):
                    model(batch())
                optimizer.step()
                hooks.pop().remove()
            output = model(batch())
            assert devices_of(optimizer) == {"cpu"}
            if end == "backward":
                output.float().pow(2).mean().backward()
                optimizer.step()
        to_host = [copy for way, copy in copies.found if way == TO_HOST]
        first = next(compute for number, compute in copies.compute.items() if "forward" in copies.runs[number])
    assert at_units[0] == {"cpu", run.machine.device.type}
    assert not all(is_ordered(copy.stamp, first.clock) for copy in to_host), "copies run beside the first forward"
    run.check()


def _fail(*_: object) -> None:
    raise ArithmeticError


def test_a_state_dict_waits_for_the_copies() -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(DEEP))
        optimizer = torch.optim.AdamW(model.parameters())
        offload_optimizer(optimizer)
        model(batch()).float().pow(2).mean().backward()
        optimizer.step()
        model(batch())
        assert not any("event synchronize" in kind for kind in run.kinds())
        optimizer.state_dict()
        assert any("event synchronize" in kind for kind in run.kinds())
    run.check(allowed=("event synchronize",))
