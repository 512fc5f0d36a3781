"""Runs one rank of one job in a separate process: ``python -m benchmarks.worker <json>``."""

from __future__ import annotations

import copy
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.counting import Counter
from benchmarks.implementations import autocast_for, library_of, optimizer_for, quiet, unreduced, wrap
from benchmarks.model import GPT, batch_of, loss_of
from benchmarks.network import sent_over_link
from benchmarks.spec import Job, Setting
from benchmarks.states import measure_states


class Training:
    """Holds a wrapped model, its optimizer and the batches of one rank."""

    def __init__(self, name: str, setting: Setting, rank: int) -> None:
        self.name, self.setting = name, setting
        torch.manual_seed(0)
        model = GPT(setting)
        library_of(name)
        # Do not count the time to wait for a rank that creates its model more slowly.
        dist.barrier()
        started = time.perf_counter()
        self.model: nn.Module = wrap(name, model, setting)
        self.wrap_s = time.perf_counter() - started
        self.optimizer = optimizer_for(self.model, setting)
        self.batches = [batch_of(setting, rank, index) for index in range(setting.accumulate)]

    def forward_backward(self) -> tuple[float, float, float]:
        """Run a step without the optimizer; return seconds in forward and in backward, and the loss."""
        forward = backward = loss_sum = 0.0
        for index, tokens in enumerate(self.batches):
            last = index == len(self.batches) - 1
            with nullcontext() if last else unreduced(self.name, self.model):
                begun = time.perf_counter()
                with autocast_for(self.name, self.setting):
                    loss = loss_of(self.model, tokens) / len(self.batches)
                middle = time.perf_counter()
                loss.backward()
                forward += middle - begun
                backward += time.perf_counter() - middle
                loss_sum += loss.item()
        return forward, backward, loss_sum

    def step(self) -> dict[str, float]:
        """Run a step; return seconds and the loss."""
        begun, cpu = time.perf_counter(), time.process_time()
        forward, backward, loss = self.forward_backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = time.perf_counter()
        return {
            "step": ended - begun,
            "forward": forward,
            "backward": backward,
            "optimizer": ended - middle,
            "cpu": time.process_time() - cpu,
            "loss": loss,
        }


def _time(job: Job, rank: int) -> dict[str, Any]:
    training = Training(job.implementation, job.setting, rank)
    for _ in range(job.setting.warmup):
        training.step()
    dist.barrier()
    crossed_before = sent_over_link() if job.setting.hosts > 1 else 0
    steps = [training.step() for _ in range(job.setting.steps)]
    dist.barrier()
    crossed = sent_over_link() - crossed_before if job.setting.hosts > 1 else 0
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        **{key: statistics.median(step[key] for step in steps) for key in ("step", "forward", "backward", "optimizer")},
        "cpu": min(step["cpu"] for step in steps),
        "rss": rss,
        "wrap": training.wrap_s,
        "loss": steps[-1]["loss"],
        "crossed": crossed / job.setting.steps,
    }


def _count(job: Job, rank: int) -> dict[str, Any]:
    training = Training(job.implementation, job.setting.small(), rank)
    # Few tokens, so that the count consists of parameters, gradients and their buffers.
    training.batches = [tokens[:, :5] for tokens in training.batches]
    for _ in range(2):
        training.forward_backward()
        training.optimizer.zero_grad()
    with Counter() as counter:
        training.forward_backward()
    return {
        "sent": counter.sent,
        "collectives": counter.collectives,
        "alive": counter.peak,
        "shared": counter.shared,
    }


def _states(job: Job, rank: int) -> dict[str, Any]:
    training = Training(job.implementation, job.setting, rank)
    for _ in range(2):
        training.step()
    with quiet():
        return measure_states(job.implementation, training.model, training.optimizer)


TASKS: dict[str, Callable[[Job, int], dict[str, Any]]] = {
    "time": _time,
    "count": _count,
    "states": _states,
}


def run_job(job: Job, rank: int) -> dict[str, Any]:
    """Run the job on one rank and return its results. The default process group must exist."""
    return TASKS[job.task](job, rank)


def main(arguments: dict[str, Any]) -> None:
    """Join the process group, measure, and write the result.

    Args:
        arguments: ``job`` (see :class:`Job`), ``rank``, ``store`` (a path for the rendezvous), ``out`` (a path). Where
            torchrun sets ranks and the rendezvous, ``rank`` is None, and ``out`` a folder.
    """
    job, rank = Job.from_json(copy.deepcopy(arguments["job"])), arguments["rank"]
    out = Path(arguments["out"])
    torch.set_num_threads(1)
    if rank is None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        out = out / f"{rank}.json"
    else:
        store = f"file://{arguments['store']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.setting.ranks)
    with quiet():
        result = run_job(job, rank)
    dist.barrier()
    out.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
