"""An error for lack of memory has notes: what each unit holds, what is allocated, and what would need less."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_flat import ShardingStrategy
from fsdp_flat.core import step_of, units_of
from fsdp_flat.guards import out_of_memory
from fsdp_flat.guards.out_of_memory import OutOfMemory, is_out_of_memory, memory_note
from tests.inspection.test_profiler_and_logs import Lines
from tests.support import on_ranks
from tests.support.beside import FRONTS, Beside
from tests.support.kit import square_loss
from tests.support.models import Stack

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")


class Fails(torch.autograd.Function):
    """Passes through, and raises an error on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ctx.error


def fail_forward(_module: nn.Module, _args: Any, _output: Any) -> None:
    raise torch.OutOfMemoryError("in forward")


def fail_backward(_module: nn.Module, _args: Any, output: torch.Tensor) -> Any:
    return Fails.apply(output, torch.OutOfMemoryError("in backward"))


@FRONTS
@pytest.mark.parametrize("hook", [fail_forward, fail_backward])
@on_ranks(2)
def test_the_note_has_what_each_unit_holds_when_memory_is_missing(
    front: str, hook: Callable[..., Any], rank: int
) -> None:
    beside = Beside(Stack(), front)
    model = beside.ours
    beside.train()
    inner = next(module for name, module in model.named_modules() if "blocks.1" in name and name.endswith("up"))
    handle = inner.register_forward_hook(hook)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        square_loss(model, beside.batch()).backward()
    (note,) = raised.value.__notes__  # one, although the error has passed through several units
    names = ["Stack", *[f"blocks.{at}" for at in range(3)], "all"]
    rows = {line.split(":")[0].strip(): line for line in note.splitlines() if ": shard " in line}
    assert {name.removeprefix("FSDP") for name in rows} == set(names)
    assert "unsharded parameters 0 B of" not in rows["blocks.1"], "it computes, so its parameters are unsharded"
    assert "process: " in note
    for remedy in (
        "FULL_SHARD, or smaller units: ",
        "activation checkpointing of 4 units",
        "CPUOffload(offload_params",
    ):
        assert remedy in note
    handle.remove()
    beside.train()  # the numbers are those of a replica


class Earlier(Stack):
    """A model with a name of its own."""


@FRONTS
@on_ranks(2)
def test_the_note_is_of_the_model_in_whose_backward_memory_is_missing(front: str, rank: int) -> None:
    earlier, beside = Beside(Earlier(), front), Beside(Stack(), front)
    for each, error in ((earlier, ValueError("another error")), (beside, torch.OutOfMemoryError("in backward"))):
        names = dict(each.ours.named_modules())
        inner = next(names[name] for name in names if "blocks.1" in name and name.endswith("up"))
        inner.register_forward_hook(lambda _module, _args, output, error=error: Fails.apply(output, error))
        with pytest.raises(type(error)) as raised:
            square_loss(each.ours, each.batch()).backward()
    (note,) = raised.value.__notes__
    assert "blocks.1: shard " in note
    assert "Earlier: shard " not in note, "its backward raised too, and did not run now"


@on_ranks(2)
def test_other_errors_have_no_notes(rank: int) -> None:
    beside = Beside(Stack())

    def fail(*_: Any) -> None:
        raise RuntimeError("something else")

    beside.ours.module.blocks[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="something else") as raised:
        square_loss(beside.ours, beside.batch())
    assert not hasattr(raised.value, "__notes__")


def test_the_allocator_of_the_cpu_is_known_by_its_text() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@on_ranks(2)
def test_the_bytes_of_the_remedies_are_those_of_the_units(rank: int) -> None:
    beside = Beside(Stack(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    beside.backward()
    units = units_of(beside.ours)
    memory = mock.Mock(
        memory_allocated=lambda _: 10**9, max_memory_allocated=lambda _: 2 * 10**9, memory_reserved=lambda _: 3 * 10**9
    )
    device = mock.Mock(type="cuda", __str__=lambda _: "cuda:0")
    with (
        mock.patch.object(torch, "get_device_module", return_value=memory),
        mock.patch.object(units[0], "options", mock.Mock(device=device)),
    ):
        note = memory_note(units)
    assert "cuda:0: 1.00 GB in tensors, 2.00 GB at most so far, 3.00 GB reserved" in note
    full = [unit.buffer_nbytes for unit in units]
    shards = sum(group.storage.nbytes for unit in units for group in unit.param_groups)
    largest = full[0] + sum(sorted(full[1:])[-2:])
    assert f"FULL_SHARD has at most {largest / 1000:.2f} kB at a time" in note
    assert f"{2 * shards / 1000:.2f} kB of shards and gradients" in note
    assert f"({2 * shards / 1000:.2f} kB for Adam)" in note


@on_ranks(2)
def test_memory_that_is_missing_between_steps_is_logged(rank: int) -> None:
    """As in the first step of an optimizer, an error of which passes through no call of the library."""
    attached: list[Callable[..., None]] = []
    beside = Beside(Stack())
    step = step_of(beside.ours, units_of(beside.ours)[0])
    guard = OutOfMemory()
    with mock.patch.object(out_of_memory, "cuda_memory_observer", attached.append):
        guard.tree_built(step, mock.Mock())
        assert attached == [], "the CPU has no observer"
        with mock.patch.object(step.root, "options", mock.Mock(device=torch.device("cuda"))):
            guard.tree_built(step, mock.Mock())
            guard.tree_built(step, mock.Mock())
    (observe,) = attached
    with Lines(logging.ERROR) as lines:
        handle = beside.ours.module.register_forward_hook(lambda *_: observe(0, 8, 16, 4))
        square_loss(beside.ours, beside.batch()).backward()
        handle.remove()
        assert lines == [], "the error gets a note"
        observe(0, 8, 16, 4)
    (line,) = lines
    assert line.startswith("An accelerator is out of memory, outside of a step.\nfsdp_flat: memory of the units")
