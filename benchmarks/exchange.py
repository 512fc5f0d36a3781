"""Measures how long hosts wait for each other at the end of a backward: ``python -m benchmarks.exchange``.

Ranks are processes of one machine that exchange by gloo over its loopback device. All-gathers and reduce-scatters are
local copies, which stand for those of an accelerator: the host issues them and does not wait. What is left of
communication is the exchange of ranks in each backward, which is measured with every rank waiting for it (as every rank
did before, and still does where a rank needs an answer) and with no rank waiting until its next forward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.implementations import optimizer_for, quiet, wrap
from benchmarks.model import GPT, batch_of, loss_of
from benchmarks.runner import ROOT, where
from benchmarks.spec import Setting
from benchmarks.tables import machine, markdown
from fsdp_flat.collectives import use_collectives
from fsdp_flat.core import Step, own_unit, step_of

WAYS = {"waits": "every rank waits", "goes on": "no rank waits"}


def _local_all_gather(output: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool = False) -> None:
    output.view(-1, own.numel()).copy_(own.clone())


def _local_reduce_scatter(
    output: torch.Tensor, full: torch.Tensor, group: Any, op: Any, async_op: bool = False
) -> None:
    output.copy_(full[: output.numel()])


class _Stopwatch:
    """Adds up the time of a method's outermost calls."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds = 0.0
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        setattr(owner, name, timed)

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure_here(units: int, steps: int) -> dict[str, dict[str, float]]:
    """Train on this rank; return the median milliseconds of a step, by way and what they were spent in."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    setting = Setting(layers=units - 1, width=16, heads=2, vocab=32, seq=4, batch=1)
    torch.manual_seed(0)
    with quiet():
        model = wrap("flat-full-orig", GPT(setting), setting)
    use_collectives(model, all_gather=_local_all_gather, reduce_scatter=_local_reduce_scatter)
    optimizer = optimizer_for(model, setting)
    tokens = batch_of(setting, dist.get_rank(), 0)
    step = step_of(model, own_unit(model))
    at_end, at_read = _Stopwatch(Step, "_set_sharded_grads"), _Stopwatch(Step, "_read_exchange")
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for step in range(2 * steps + 4):
        way = list(WAYS)[step % 2]
        begun = time.perf_counter()
        loss = loss_of(model, tokens)
        if way == "waits":
            step._waits_for_ranks = True
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end, stepped = at_end.take(), time.perf_counter() - begun
        # What the next forward will read is this step's.
        step.recover()
        if step >= 4:
            found[way].append((stepped, end, at_read.take()))
        at_read.take()
    dist.barrier()
    dist.destroy_process_group()
    return {
        way: {
            key: 1e3 * statistics.median(row[index] for row in rows)
            for index, key in enumerate(("step", "end", "read"))
        }
        for way, rows in found.items()
    }


def _on_ranks(num_ranks: int, units: int, steps: int) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "benchmarks.exchange", "--here", "--units", str(units), "--steps", str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{num_ranks} ranks failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


def exchange_table(rows: dict[int, dict[str, dict[str, float]]]) -> str:
    """Make the table: milliseconds of rank 0, medians over steps."""
    header = ["ranks", "way", "step ms", "end of backward ms", "reading at the next forward ms"]
    table = [
        [str(ranks), text, *(f"{rows[ranks][way][key]:.2f}" for key in ("step", "end", "read"))]
        for ranks in rows
        for way, text in WAYS.items()
    ]
    return markdown(header, table)


def main(argv: list[str] | None = None) -> None:
    """Measure numbers of ranks one after another, in steps that alternate between the ways; print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--units", type=int, default=13)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each way")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON")
    parser.add_argument("--here", action="store_true", help="measure on this rank of a torchrun program")
    args = parser.parse_args(argv)
    if args.here:
        found = measure_here(args.units, args.steps)
        if int(os.environ["RANK"]) == 0:
            print(json.dumps(found))
        return
    rows = {num_ranks: _on_ranks(num_ranks, args.units, args.steps) for num_ranks in args.ranks}
    args.out.mkdir(parents=True, exist_ok=True)
    results = {"where": where(), "rows": rows}
    (args.out / "exchange.json").write_text(json.dumps(results, indent=1))
    print(f"{machine(results)}\n\n{exchange_table(rows)}")


if __name__ == "__main__":
    main()
