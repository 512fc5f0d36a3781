"""Measures the cost per unit and per rank: ``python -m benchmarks.scale``.

With a process group of torch's "fake" backend, one process is rank 0 of any number of ranks. Nothing is sent and
results are wrong, so only host time and memory are measured. Models are so small that kernels take almost no time.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.implementations import library_of, quiet, shard
from benchmarks.link import HostStreams, Link, pretended
from benchmarks.model import GPT, Block, batch_of, loss_of
from benchmarks.runner import in_new_process, where
from benchmarks.spec import IMPLEMENTATIONS, Setting
from benchmarks.tables import machine, markdown, save_results

_STEPS = 15
NAMES = ("local", "fsdp1-full-flat", "fsdp1-full-orig", "fsdp2", "flat-full-flat", "flat-full-orig", "flat-fully-shard")


def measure(name: str, world: int, units: int) -> dict[str, float]:
    """Wrap and train a tiny model in this process, as rank 0 of simulated ranks.

    Args:
        name: the implementation.
        world: the number of ranks.
        units: the number of units: blocks and the outermost unit.

    Returns:
        ``wrap`` and ``step`` (seconds of CPU time; the minimum of a step without optimizer), ``held`` (bytes by which
        resident memory grew from before wrapping to after the steps).
    """
    torch.set_num_threads(1)
    setting, each = Setting(layers=units - 1, width=16, heads=2, vocab=32, seq=4, batch=1), IMPLEMENTATIONS[name]
    # Copies for every rank are no cost of a library.
    with pretended(world, Link(world, None, HostStreams(), copies=False)), quiet():
        torch.manual_seed(0)
        model, tokens = GPT(setting), batch_of(setting, 0, 0)
        if each.is_sharded:
            library_of(each)
        gc.collect()
        before = _resident()
        begun = time.process_time()
        sharded = shard(each, model, {Block})
        wrap_s = time.process_time() - begun
        times = []
        for _ in range(_STEPS):
            cpu = time.process_time()
            loss_of(sharded, tokens).backward()
            times.append(time.process_time() - cpu)
            sharded.zero_grad()
        return {"wrap": wrap_s, "step": min(times), "held": _resident() - before}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def scale_table(results: dict[str, Any]) -> str:
    """Name the command and the machine, and make the table of wrapping time, host time per unit, and memory."""
    local = {row["units"]: row["step"] for row in results["rows"] if row["name"] == "local"}
    rows = [
        [
            IMPLEMENTATIONS[row["name"]].title,
            str(row["units"]),
            str(row["world"]),
            format(1e3 * row["wrap"] / row["units"], ".2f"),
            format(1e3 * (row["step"] - local[row["units"]]) / row["units"], ".3f"),
            format(row["held"] / 1e6, ".1f"),
        ]
        for row in results["rows"]
        if row["name"] != "local"
    ]
    header = ["implementation", "units", "ranks", "wrap ms a unit", "host ms a unit and step", "MB held"]
    return f"`{results['command']}`.\n{machine(results)}\n{markdown(header, rows)}"


def main(argv: list[str] | None = None) -> None:
    """Measure every combination in a separate process; write JSON and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4096])
    parser.add_argument("--units", type=int, nargs="+", default=[25, 200])
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of all combinations")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    found: dict[tuple[str, int, int], list[dict[str, float]]] = {}
    for index in range(args.rounds):
        for units in args.units:
            for name in dict.fromkeys(["local", *args.only]):
                for world in args.ranks if name != "local" else args.ranks[:1]:
                    one = in_new_process(measure, name, world, units)
                    found.setdefault((name, world, units), []).append(one)
                    what = f"round {index + 1}: {name}, {units} units, {world} ranks"
                    print(f"{what}: {1e3 * one['step']:.1f} ms a step", flush=True)
    # Take the minimum of everything: other load on the machine can only add.
    rows = [
        {"name": name, "world": world, "units": units, **{key: min(one[key] for one in some) for key in some[0]}}
        for (name, world, units), some in found.items()
    ]
    command = " ".join(["python -m benchmarks.scale", *(sys.argv[1:] if argv is None else argv)])
    results = {"rows": rows, "command": command, "where": where()}
    save_results(args.out, "scale", results, scale_table(results))


if __name__ == "__main__":
    main()
