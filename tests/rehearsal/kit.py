"""Runs training steps on the fake accelerator and reports defects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.rehearsal import seam
from tests.rehearsal.check import Checker, Finding
from tests.rehearsal.fake_collectives import FakeCollectives
from tests.rehearsal.fake_device import DEVICE, fake_accelerator
from tests.rehearsal.memory import MemoryRecorder
from tests.rehearsal.streams import Machine
from tests.support.kit import BLOCKS, ROWS, WIDTH, wrapped
from tests.support.models import Stack

NUM_RANKS = 4
END_OF_BACKWARD = "end of backward"


@dataclass
class Rehearsal:
    """Holds a fake machine and the defects found during the run.

    Attributes:
        models: wrapped models, whose storages are named in reports.
    """

    machine: Machine
    checker: Checker
    recorder: MemoryRecorder
    collectives: FakeCollectives
    models: list[nn.Module] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Return the defects found so far."""
        return self.checker.findings

    def kinds(self) -> set[str]:
        """Return the kinds of the defects found so far."""
        return {finding.kind for finding in self.findings}

    def check(self, *, allowed: Sequence[str] = ()) -> None:
        """Raise if anything was found, except findings whose text contains one of ``allowed``."""
        assert self.checker.num_accesses > 0, "nothing was recorded"
        found = [text for text in map(str, self.findings) if not any(part in text for part in allowed)]
        assert not found, f"{len(found)} defects:\n" + "\n".join(found[:12])

    def check_waits_come_last(self) -> None:
        """Raise if backward continues after the host has waited in it, since the device is idle then."""
        waited = False
        for entry in self.recorder.log:
            waited = (waited or entry == "wait") and entry != END_OF_BACKWARD
            assert not (waited and entry in ("aten::mm", "aten::tanh_backward")), "backward goes on after a wait"

    def wrap(self, module: nn.Module | None = None, **kwargs: Any) -> nn.Module:
        """Shard a model on the accelerator; discard findings during construction."""
        self.checker.is_on = False
        if module is None:
            with DEVICE:
                module = Stack()
        kwargs.setdefault("auto_wrap_policy", BLOCKS)
        model = wrapped(module, **kwargs)
        self.models.append(model)
        self.recorder.name_storages()
        self.recorder.log.clear()
        self.checker.is_on = True
        return model


@contextmanager
def rehearsal(*, with_library: bool = True) -> Iterator[Rehearsal]:
    """Provide a fake accelerator inside the block; ``with_library`` makes fsdp_flat train on it."""
    machine = Machine(DEVICE)
    checker = Checker(machine)
    models: list[nn.Module] = []
    recorder = MemoryRecorder(
        machine, checker, lambda: {key: name for model in models for key, name in seam.names_of_storages(model).items()}
    )
    collectives = FakeCollectives(machine, recorder)
    library = seam.installed(machine, collectives) if with_library else nullcontext()
    with library, fake_accelerator(machine, recorder):
        yield Rehearsal(machine, checker, recorder, collectives, models)


def batch() -> torch.Tensor:
    """Create a batch on the accelerator."""
    return torch.zeros(ROWS, WIDTH, device=DEVICE)


def train(
    run: Rehearsal,
    model: nn.Module,
    *,
    num_steps: int = 2,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    before_step: Callable[[nn.Module], object] = lambda model: None,
    micro_batches: int = 1,
) -> None:
    """Train; each step runs ``micro_batches - 1`` backwards inside ``no_sync``."""
    optimizer_ = optimizer(model.parameters())
    for _ in range(num_steps):
        for _ in range(micro_batches - 1):
            with model.no_sync():  # type: ignore[operator]
                model(batch()).float().pow(2).mean().backward()
            run.recorder.log.append(END_OF_BACKWARD)
        model(batch()).float().pow(2).mean().backward()
        run.recorder.log.append(END_OF_BACKWARD)
        run.recorder.name_storages()
        before_step(model)
        optimizer_.step()
        optimizer_.zero_grad()
