"""``step_metrics``: what a training run logs of its steps, as plain numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_flat import ShardingStrategy, describe, step_metrics
from fsdp_flat.comm.streams import Streams
from fsdp_flat.composable import trace
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError
from fsdp_flat.extras import metrics
from tests.support import on_ranks
from tests.support.beside import FRONTS, Beside
from tests.support.models import Stack


@FRONTS
@on_ranks(2)
def test_the_bytes_are_those_of_the_collectives_since_the_last_call(front: str, rank: int) -> None:
    beside = Beside(Stack(), front)
    model = beside.ours
    beside.train()
    first = step_metrics(model)
    assert set(first) == {"peak_bytes"}
    assert first["peak_bytes"] > 1 << 20
    with trace(model) as events:
        beside.train(num_steps=2)
    counts = Counter((event, name.replace("FSDPStack", "Stack")) for event, name in events)
    units = [replace(unit, name=unit.name.replace("FSDPStack", "Stack")) for unit in describe(model).units]
    found = step_metrics(model)
    assert {type(value) for value in found.values()} <= {int, float}
    assert found["gathered_bytes"] == sum(counts["unshard", unit.name] * unit.gathered_nbytes for unit in units)
    assert found["reduced_bytes"] == sum(2 * unit.whole_grad_nbytes for unit in units)
    assert found["gathered_bytes"] > found["reduced_bytes"] > 0
    again = step_metrics(model)
    assert (again["gathered_bytes"], again["reduced_bytes"], again["waited_seconds"]) == (0, 0, 0)


@on_ranks(2)
def test_no_rank_measures_before_it_asks_and_one_may_ask_alone(rank: int) -> None:
    beside = Beside(Stack())
    if rank == 0:
        step_metrics(beside.ours)  # the outermost unit takes over the others, with what measures them
    beside.train()
    assert all((unit.step.meter is not None) == (rank == 0) for unit in units_of(beside.ours))
    if rank == 0:
        assert step_metrics(beside.ours)["gathered_bytes"] > 0
    beside.train()


@on_ranks(2)
def test_waits_count_once_where_one_event_is_inside_another(rank: int) -> None:
    """A clock goes on by a second each time that it is read: when an interval, and a wait, begins and ends."""
    beside = Beside(Stack())
    beside.train()
    with mock.patch.object(metrics, "perf_counter", itertools.count().__next__):
        step_metrics(beside.ours)
        beside.train(num_steps=1)
        found = step_metrics(beside.ours, tokens=30, flop=900, peak_flops=450)
    assert found["waited_seconds"] > 4
    assert found["seconds"] == 2 * found["waited_seconds"] + 1
    assert found["tokens_per_second"] == 30 / found["seconds"]
    assert found["flop_per_second"] == 900 / found["seconds"]
    assert found["mfu"] == 2 / found["seconds"]


@on_ranks(2)
@pytest.mark.parametrize("clips", ["method", "torch"])
def test_the_norm_is_that_before_the_last_clipping(clips: str, rank: int) -> None:
    beside = Beside(Stack(), "originals")
    model = beside.ours
    beside.backward()
    clip = (
        model.clip_grad_norm_ if clips == "method" else lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)
    )
    norm = clip(1e-3)
    assert step_metrics(model)["grad_norm"] == pytest.approx(float(norm))
    assert "grad_norm" not in step_metrics(model)


@on_ranks(2)
def test_a_model_that_shards_nothing_moves_no_parameters(rank: int) -> None:
    beside = Beside(Stack(), sharding_strategy=ShardingStrategy.NO_SHARD)
    step_metrics(beside.ours)
    beside.train(num_steps=1)
    found = step_metrics(beside.ours)
    assert found["gathered_bytes"] == 0
    assert found["reduced_bytes"] == sum(unit.whole_grad_nbytes for unit in describe(beside.ours).units)


def test_a_model_without_units_is_named() -> None:
    with pytest.raises(OptionError, match="Linear holds no FullyShardedDataParallel"):
        step_metrics(nn.Linear(2, 2))


class _Clock:
    """Stands for an accelerator: its time, and the streams and events on it."""

    seconds = 0.0

    def record_event(self, event: _Event) -> None:
        event.seconds = self.seconds

    def wait_stream(self, _stream: object) -> None:
        self.seconds += 0.25

    def __enter__(self) -> None:
        """Be the current stream."""

    def __exit__(self, *_: object) -> None:
        """Be so no more."""


class _Event:
    seconds = -1.0
    synchronized = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing

    def synchronize(self) -> None:
        _Event.synchronized += 1

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end.seconds - self.seconds)


def test_an_accelerator_measures_the_waits_of_compute_and_keeps_few_events() -> None:
    clock = _Clock()
    with (
        mock.patch.object(torch, "Event", _Event),
        mock.patch.object(torch.accelerator, "current_stream", return_value=clock),
        mock.patch("fsdp_flat.comm.streams._MOST_WAITS", 8),
    ):
        streams = Streams(torch.device("meta"), new_stream=lambda *_, **__: clock)
        with streams.ends_of_all_gathers:
            pass
        streams.wait_for_all_gathers()
        assert streams.seconds_waited() == 0  # it measures from now on
        for _ in range(20):
            streams.wait_for_all_gathers()
        assert _Event.synchronized == 12
        assert streams.seconds_waited() == 5
        assert streams.seconds_waited() == 0
