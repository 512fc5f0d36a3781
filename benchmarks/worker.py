"""Measures on one rank of a process group: the tasks that ``benchmarks.runner`` runs in new processes."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.counting import Counter
from benchmarks.implementations import library_of, quiet, shard
from benchmarks.model import GPT, Block, batch_of, loss_of
from benchmarks.network import sent_over_link
from benchmarks.spec import ALL, Implementation, Setting
from benchmarks.states import measure_states

TIMEOUT = timedelta(minutes=15)


class Training:
    """Holds a sharded model, its optimizer and the batches of one rank."""

    def __init__(self, each: Implementation, setting: Setting, rank: int) -> None:
        self.each, self.setting = each, setting
        torch.manual_seed(0)
        model = GPT(setting)
        if each.is_sharded:
            library_of(each)
        # Do not count the time to wait for a rank that creates its model more slowly.
        dist.barrier()
        started = time.perf_counter()
        self.model = shard(each, model, {Block}, bf16=setting.bf16, hosts=setting.hosts)
        self.wrap_s = time.perf_counter() - started
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=setting.fused or None)
        self.batches = [batch_of(setting, rank, index) for index in range(setting.accumulate)]
        self.no_sync: Callable[[], AbstractContextManager[None]] = getattr(self.model, "no_sync", nullcontext)
        if each.is_sharded and not each.is_wrapper:
            self.no_sync = self._without_sync

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def forward_backward(self) -> tuple[float, float, float]:
        """Run a step without the optimizer; return seconds in forward and in backward, and the loss."""
        forward = backward = loss_sum = 0.0
        for index, tokens in enumerate(self.batches):
            last = index == len(self.batches) - 1
            with nullcontext() if last else self.no_sync():
                begun = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=self.setting.bf16 and not self.each.is_sharded):
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


def _time(rank: int, name: str, setting: Setting) -> dict[str, Any]:
    training = Training(ALL[name], setting, rank)
    for _ in range(setting.warmup):
        training.step()
    dist.barrier()
    crossed_before = sent_over_link() if setting.hosts > 1 else 0
    steps = [training.step() for _ in range(setting.steps)]
    dist.barrier()
    crossed = sent_over_link() - crossed_before if setting.hosts > 1 else 0
    return {
        **{key: statistics.median(step[key] for step in steps) for key in ("step", "forward", "backward", "optimizer")},
        "cpu": min(step["cpu"] for step in steps),
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "wrap": training.wrap_s,
        "loss": steps[-1]["loss"],
        "crossed": crossed / setting.steps,
    }


def _count(rank: int, name: str, setting: Setting) -> dict[str, Any]:
    training = Training(ALL[name], setting.small(), rank)
    # Few tokens, so that the count consists of parameters, gradients and their buffers.
    training.batches = [tokens[:, :5] for tokens in training.batches]
    for _ in range(2):
        training.forward_backward()
        training.optimizer.zero_grad()
    with Counter() as counter:
        training.forward_backward()
    return {"sent": counter.sent, "alive": counter.peak, "shared": counter.shared}


def _states(rank: int, name: str, setting: Setting) -> dict[str, Any]:
    training = Training(ALL[name], setting, rank)
    for _ in range(2):
        training.step()
    return measure_states(training.each, training.model, training.optimizer)


TASKS: dict[str, Callable[[int, str, Setting], dict[str, Any]]] = {"time": _time, "count": _count, "states": _states}


def run_task(rank: int, task: str, name: str, setting: Setting) -> dict[str, Any]:
    """Return what a task says of an implementation on one rank. The default process group must exist."""
    with quiet():
        return TASKS[task](rank, name, setting)


def main(task: str, name: str, setting: dict[str, Any], folder: str) -> None:
    """Run a task on a rank that torchrun has started, and write the result into a folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    Path(folder, f"{rank}.json").write_text(json.dumps(run_task(rank, task, name, Setting(**setting))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
