"""Runs each job in fresh processes, in rounds that alternate between the implementations."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.network import two_hosts
from benchmarks.spec import Job, Setting

ROOT = Path(__file__).parent.parent


class JobError(RuntimeError):
    """Reports that a rank of a job failed; the text is the end of its output."""


def where() -> dict[str, Any]:
    """Return the machine and the versions, for the page."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def run_processes(job: Job, timeout_s: float = 900) -> list[dict[str, Any]]:
    """Run one job in ``job.setting.ranks`` new single-threaded processes; return their results by rank.

    Args:
        job: the job.
        timeout_s: seconds after which the job counts as failed.

    Raises:
        JobError: a rank failed or took too long.
        NoNetworkError: two hosts were asked for, and this machine can make none.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_flat_bench_") as folder, ExitStack() as stack:
        arguments = {"job": job.as_json(), "rank": None, "store": f"{folder}/store", "out": folder}
        if job.setting.hosts > 1:
            hosts = stack.enter_context(two_hosts(job.setting.gbit))
            logs = [Path(folder) / f"host{host}.log" for host in (0, 1)]
            program = ["-m", "benchmarks.worker", json.dumps(arguments)]
            processes = hosts.start(job.setting.ranks // 2, program, logs, folder=ROOT)
        else:
            processes, logs = [], [Path(folder) / f"{rank}.log" for rank in range(job.setting.ranks)]
            for rank, path in enumerate(logs):
                own = {**arguments, "rank": rank, "out": f"{folder}/{rank}.json"}
                program = [sys.executable, "-m", "benchmarks.worker", json.dumps(own)]
                threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                with path.open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            program, cwd=ROOT, env={**os.environ, **threads}, stdout=log, stderr=subprocess.STDOUT
                        )
                    )
        _wait(job, processes, logs, timeout_s)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.setting.ranks)]


def _wait(job: Job, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if any(process.poll() != 0 for process in processes):
            tails = "\n".join(f"{log.stem}: {log.read_text()[-2000:]}" for log in logs)
            raise JobError(f"{job.implementation}, {job.task}: a rank failed or took over {timeout_s} s.\n{tails}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def measure(
    names: Sequence[str],
    setting: Setting,
    *,
    rounds: int,
    states: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time the steps of ``names`` in interleaved rounds and count bytes once; with ``states``, time state dicts.

    Returns:
        ``rounds`` (a list of {name: mean over ranks}), ``counts`` by name, ``states`` (a list of {name: {kind: seconds
        on rank 0}}), all plain values.
    """

    def run(name: str, task: str) -> list[dict[str, Any]]:
        return run_processes(Job(name, task, setting))

    results: dict[str, Any] = {"rounds": [], "counts": {}, "states": []}
    for index in range(rounds):
        row: dict[str, Any] = {}
        # Reverse every other round, so that a machine that slows down affects every implementation.
        for name in names if index % 2 == 0 else reversed(names):
            if states:
                row[name] = run(name, "states")[0]
                say(f"round {index + 1}/{rounds} {name}: {len(row[name])} kinds of state dicts")
            else:
                row[name] = _over_ranks(run(name, "time"))
                say(f"round {index + 1}/{rounds} {name}: {1e3 * row[name]['step']:.1f} ms a step")
        results["states" if states else "rounds"].append(row)
    for name in () if states else names:
        if name != "local":
            results["counts"][name] = _over_ranks(run(name, "count"))
            say(f"counted {name}: {results['counts'][name]['sent'] / 1e6:.1f} MB sent a step")
    return results


def _over_ranks(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means over ranks, and the maximum for memory."""
    largest = ("rss", "alive")
    return {
        key: max(r[key] for r in results) if key in largest else sum(r[key] for r in results) / len(results)
        for key in results[0]
    }
