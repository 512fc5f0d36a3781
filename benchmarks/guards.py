"""Measures what guards cost: steps with and without them take turns in one process: ``python -m benchmarks.guards``."""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.spec import IMPLEMENTATIONS, PRESETS
from benchmarks.worker import Training

_TURNS, _STEPS = 6, 8
_NAMES = ("flat-full-flat", "flat-full-orig", "flat-fully-shard")


def cpu_times(training: Training) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of steps with guards, and of steps without. Every rank must call this."""
    from fsdp_flat.guards import guards_off

    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * _TURNS):
        with guards_off() if turn % 2 else nullcontext():
            for _ in range(_STEPS):
                begun = time.process_time()
                training.step()
                found[turn % 2].append(time.process_time() - begun)
    return found


def main() -> None:
    """Print the costs on two ranks, with many small units, where host time counts most."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_on_rank, (2, store.port), 2)


def _on_rank(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    setting = PRESETS["tiny"]
    for name in _NAMES:
        training = Training(name, setting, rank)
        for _ in range(_STEPS):
            training.step()
        with_guards, without = map(statistics.median, cpu_times(training))
        if rank == 0:
            extra = (with_guards - without) * 1e6 / (setting.layers + 1)
            print(
                f"{IMPLEMENTATIONS[name]}: {with_guards * 1e3:.1f} ms of CPU a step of {setting.layers + 1} units, "
                f"{without * 1e3:.1f} without guards ({with_guards / without:.3f}; {extra:.0f} us a unit)"
            )
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
