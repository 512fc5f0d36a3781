"""Loggers of metrics take what ``step_metrics`` returns, as docs/logging.md shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from fsdp_flat import step_metrics
from tests.support import on_ranks
from tests.support.beside import Beside
from tests.support.models import Stack

NAMES = {
    *("peak_bytes", "seconds", "gathered_bytes", "reduced_bytes", "waited_seconds"),
    *("grad_norm", "tokens_per_second", "flop_per_second", "mfu"),
}


def steps(beside: Beside) -> list[dict[str, float]]:
    """The metrics of three steps, the first of which has no interval to measure."""
    found = []
    for _ in range(3):
        beside.backward()
        nn.utils.clip_grad_norm_(beside.ours.parameters(), 1.0)
        beside.step()
        found.append(step_metrics(beside.ours, tokens=24, flop=1e6, peak_flops=1e9))
    assert [set(each) for each in found] == [{"peak_bytes", "grad_norm"}, NAMES, NAMES]
    return found


@on_ranks(2)
def test_tensorboard_shows_each_metric(tmp_path: Path, rank: int) -> None:
    found = steps(Beside(Stack()))
    if rank == 0:
        with SummaryWriter(tmp_path) as writer:
            for step, metrics in enumerate(found):
                for name, value in metrics.items():
                    writer.add_scalar(f"fsdp/{name}", value, step)
        read = EventAccumulator(str(tmp_path)).Reload()
        for name in NAMES:
            values = [each[name] for each in found if name in each]
            assert [event.value for event in read.Scalars(f"fsdp/{name}")] == pytest.approx(values, rel=1e-6)


@on_ranks(2)
def test_wandb_takes_the_metrics_of_a_run_without_a_network(tmp_path: Path, rank: int) -> None:
    found = steps(Beside(Stack()))
    if rank == 0:
        with wandb.init(project="test", dir=tmp_path, mode="offline") as run:
            for step, metrics in enumerate(found):
                run.log({f"fsdp/{name}": value for name, value in metrics.items()}, step=step, commit=True)
            assert {name: run.summary[f"fsdp/{name}"] for name in NAMES} == pytest.approx(found[-1])
        assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
