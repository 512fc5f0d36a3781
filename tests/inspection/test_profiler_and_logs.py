"""Profiler traces, logs and recorded events of a step: ranges with FSDP's labels, one line a unit and a transition."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_flat import ShardingStrategy
from fsdp_flat.composable import trace
from fsdp_flat.core import step_of, units_of
from tests.support import on_ranks
from tests.support.beside import APPLY, FRONTS, WRAPPER_FRONTS, Beside, batch
from tests.support.kit import square_loss
from tests.support.models import Block, Stack


class Lines(logging.Handler):
    """Keeps the lines of the library's logger."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self.logger = logging.getLogger("fsdp_flat")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self.logger.addHandler(self)
        self.logger.setLevel(self.level)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(logging.NOTSET)


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_profiled_step_has_ranges_of_every_unit_with_the_labels_of_fsdp(front: str, rank: int) -> None:
    beside = Beside(Stack(), front)
    beside.train()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        square_loss(beside.ours, batch(rank)).backward()
    labels = {event.key for event in profiled.key_averages()}
    for operation in ("pre_forward", "all_gather", "post_forward", "pre_backward", "post_backward", "reduce_scatter"):
        assert f"FSDP::{operation} (blocks.0)" in labels, sorted(label for label in labels if "FSDP" in label)
    assert "FSDP::root_post_backward (Stack)" in labels
    assert "FSDP::all_gather_wait (Stack)" in labels


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_profiled_backward_leaves_no_collective_in_flight(front: str, rank: int) -> None:
    """torch's profiler writes to freed memory if a collective of gloo ends while it stops."""
    beside = Beside(Stack(), front)
    beside.train(num_steps=3)
    step = step_of(beside.ours, units_of(beside.ours)[0])
    square_loss(beside.ours, batch(rank)).backward()
    assert step.end.unread is not None
    with profile(activities=[ProfilerActivity.CPU]):
        square_loss(beside.ours, batch(rank)).backward()
        assert step.end.unread is None


@on_ranks(2)
def test_the_first_use_logs_units_and_the_way_tensors_move_and_later_steps_nothing(rank: int) -> None:
    group = dist.new_group()
    with Lines(logging.INFO) as lines:
        beside = Beside(Stack(), process_group=group, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        beside.train(num_steps=1)
        num_lines = len(lines)
        beside.train(num_steps=2)
    units = [line for line in lines if line.startswith("unit ")]
    assert len(units) == 1 + len(beside.plain.blocks)
    assert "SHARD_GRAD_OP over 2 ranks" in units[0], units
    assert "bytes a rank" in units[0]
    assert [line for line in lines if "tensors on the CPU move by" in line]
    assert len(lines) == num_lines


@on_ranks(2)
@pytest.mark.parametrize("event", ["unshard", "wait_for_unshard", "reshard", "pre_backward", "reduce_scatter"])
def test_each_transition_is_logged_for_debugging(event: str, rank: int) -> None:
    beside = Beside(Stack())
    beside.train()
    with Lines(logging.DEBUG) as lines:
        square_loss(beside.ours, batch(rank)).backward()
    assert f"{event} of unit 'blocks.1'" in lines


def blocks(front: str, number: int = 2) -> nn.Sequential:
    return nn.Sequential(*[APPLY[front](Block().double()) for _ in range(number)])


@FRONTS
@on_ranks(2)
def test_a_trace_inside_another_ends_alone(front: str) -> None:
    (model,) = blocks(front, 1)
    with trace(model) as outer:
        with trace(model) as inner:
            square_loss(model, batch(dist.get_rank())).backward()
        seen = list(inner)
        with torch.no_grad():
            model(batch(dist.get_rank()))
    assert ("reduce_scatter", "Block") in seen
    assert inner == seen
    assert [event for event, _ in outer][:1] == ["pre_forward"]
    assert ("reduce_scatter", "Block") not in outer


@FRONTS
@on_ranks(2)
def test_all_outermost_units_below_a_plain_module_are_traced(front: str) -> None:
    model = blocks(front)
    with trace(model) as events:
        square_loss(model, batch(dist.get_rank())).backward()
    assert [event for event, _ in events].count("pre_forward") == 2
    assert [event for event, _ in events].count("reduce_scatter") == 2
