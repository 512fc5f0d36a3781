"""Runs tasks on new ranks, in rounds that alternate between the implementations."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.network import two_hosts
from benchmarks.spec import Setting
from benchmarks.worker import TIMEOUT, run_task

ROOT = Path(__file__).parent.parent
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def where() -> dict[str, Any]:
    """Return the machine and the versions, for the page."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.processor()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "date": time.strftime("%Y-%m-%d"),
    }


def on_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """Call ``function(rank, *arguments)`` on ranks of one thread in new processes; return the plain values it returns.

    It must be a function of a module, and raises here what it raises on a rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mock.patch.dict(os.environ, _THREADS):
        torch.multiprocessing.spawn(_on_rank, (function, num_ranks, store.port, arguments), num_ranks)
    return [json.loads(store.get(f"result {rank}")) for rank in range(num_ranks)]


def _on_rank(rank: int, function: Callable[..., Any], num_ranks: int, port: int, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    store.set(f"result {rank}", json.dumps(function(rank, *arguments)))
    dist.destroy_process_group()


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a new process of its own; return what it returns, or raise what it raises."""
    with ProcessPoolExecutor(1, torch.multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def _on_two_hosts(task: str, name: str, setting: Setting) -> list[dict[str, Any]]:
    """Run a task on ranks of two hosts; raises a NoNetworkError if this machine can make none."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(setting.gbit) as hosts:
        logs = [Path(folder) / f"host{host}.log" for host in (0, 1)]
        program = ["-m", "benchmarks.worker", json.dumps([task, name, asdict(setting), folder])]
        processes = hosts.start(setting.ranks // 2, program, logs, folder=ROOT)
        if sum(process.wait() != 0 for process in processes):
            tails = "\n".join(f"{log.stem}: {log.read_text()[-2000:]}" for log in logs)
            raise RuntimeError(f"{name}, {task}: a rank failed.\n{tails}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(setting.ranks)]


def measure(names: Sequence[str], setting: Setting, *, rounds: int, states: bool) -> dict[str, Any]:
    """Time the steps of ``names`` in interleaved rounds and count bytes once; with ``states``, time state dicts.

    Returns:
        ``rounds`` (a list of {name: mean over ranks}), ``counts`` by name, ``states`` (a list of {name: {kind: seconds
        on rank 0}}), all plain values.
    """

    def run(name: str, task: str) -> list[dict[str, Any]]:
        if setting.hosts > 1:
            return _on_two_hosts(task, name, setting)
        return on_ranks(run_task, setting.ranks, task, name, setting)

    results: dict[str, Any] = {"rounds": [], "counts": {}, "states": []}
    for index in range(rounds):
        row: dict[str, Any] = {}
        # Reverse every other round, so that a machine that slows down affects every implementation.
        for name in names if index % 2 == 0 else reversed(names):
            row[name] = run(name, "states")[0] if states else _over_ranks(run(name, "time"))
            what = f"{len(row[name])} kinds of state dicts" if states else f"{1e3 * row[name]['step']:.1f} ms a step"
            print(f"round {index + 1}/{rounds} {name}: {what}", flush=True)
        results["states" if states else "rounds"].append(row)
    for name in () if states else names:
        if name != "local":
            results["counts"][name] = _over_ranks(run(name, "count"))
            print(f"counted {name}: {results['counts'][name]['sent'] / 1e6:.1f} MB sent a step", flush=True)
    return results


def _over_ranks(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means over ranks, and the maximum for memory."""
    largest = ("rss", "alive")
    return {
        key: max(r[key] for r in results) if key in largest else sum(r[key] for r in results) / len(results)
        for key in results[0]
    }
