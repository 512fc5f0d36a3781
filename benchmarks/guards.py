"""Measures what guards cost: steps with and without them take turns in one process: ``python -m benchmarks.guards``."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext

from benchmarks.runner import on_ranks
from benchmarks.spec import IMPLEMENTATIONS, PRESETS
from benchmarks.worker import Training
from fsdp_flat.guards import guards_off

_TURNS, _STEPS = 6, 8
_NAMES = ("flat-full-flat", "flat-full-orig", "flat-fully-shard")
SETTING = PRESETS["tiny"]  # many small units, where host time counts most


def cpu_times(rank: int, name: str) -> list[float]:
    """Return the median CPU seconds of steps with guards, and of steps without. Every rank must call this."""
    training = Training(IMPLEMENTATIONS[name], SETTING, rank)
    for _ in range(_STEPS):
        training.step()
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * _TURNS):
        with guards_off() if turn % 2 else nullcontext():
            for _ in range(_STEPS):
                begun = time.process_time()
                training.step()
                found[turn % 2].append(time.process_time() - begun)
    return [statistics.median(times) for times in found]


def main() -> None:
    """Print the costs on two ranks."""
    num_units = SETTING.layers + 1
    for name in _NAMES:
        with_guards, without = on_ranks(cpu_times, 2, name)[0]
        print(
            f"{IMPLEMENTATIONS[name].title}: {with_guards * 1e3:.1f} ms of CPU a step of {num_units} units, "
            f"{without * 1e3:.1f} without guards ({with_guards / without:.3f}; "
            f"{(with_guards - without) * 1e6 / num_units:.0f} us a unit)",
            flush=True,
        )


if __name__ == "__main__":
    main()
