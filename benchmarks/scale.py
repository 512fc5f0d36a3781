"""Measures the cost per unit and per rank: ``python -m benchmarks.scale``.

With a process group of torch's "fake" backend, one process is rank 0 of any number of ranks. Nothing is sent and
results are wrong, so only host time and memory are measured. Models are so small that kernels take almost no time.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.implementations import library_of, quiet, wrap
from benchmarks.model import GPT, batch_of, loss_of
from benchmarks.runner import ROOT, where
from benchmarks.spec import IMPLEMENTATIONS, Setting
from benchmarks.tables import machine, markdown, save_results

NAMES = ("local", "fsdp1-full-flat", "fsdp1-full-orig", "fsdp2", "flat-full-flat", "flat-full-orig", "flat-fully-shard")


def setting_for(units: int) -> Setting:
    """Return the setting of a tiny model of ``units`` units: blocks and the outermost unit."""
    return Setting(layers=units - 1, width=16, heads=2, vocab=32, seq=4, batch=1)


def measure_here(name: str, world: int, units: int, *, steps: int = 15) -> dict[str, float]:
    """Wrap and train in this process, as rank 0 of ``world`` simulated ranks.

    Args:
        name: the implementation.
        world: the number of ranks.
        units: the number of units.
        steps: the number of steps.

    Returns:
        ``wrap`` and ``step`` (seconds of CPU time; the minimum of a step without optimizer), ``held`` (bytes by which
        resident memory grew from before wrapping to after the steps).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        torch.manual_seed(0)
        setting = setting_for(units)
        model, tokens = GPT(setting), batch_of(setting, 0, 0)
        library_of(name)
        _move_nothing()
        gc.collect()
        before = _resident()
        begun = time.process_time()
        with quiet():
            wrapped = wrap(name, model, setting)
            wrap_s = time.process_time() - begun
            times = []
            for _ in range(steps):
                cpu = time.process_time()
                loss_of(wrapped, tokens).backward()
                times.append(time.process_time() - cpu)
                wrapped.zero_grad()
        return {"wrap": wrap_s, "step": min(times), "held": _resident() - before}
    finally:
        dist.destroy_process_group()


class _Done:
    """Stands for a finished collective."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _move_nothing() -> None:
    """Replace the collectives of the "fake" backend, whose copies for every rank are no cost of a library."""
    from fsdp_flat.comm import torch_comm

    def nothing(*_: Any, **__: Any) -> _Done:
        return _Done()

    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(torch_comm, name, nothing)
        setattr(dist, name, nothing)
    for name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, nothing)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _measure(name: str, world: int, units: int) -> dict[str, float]:
    flags = ["--here", name, str(world), str(units)]
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *flags],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(out.stdout.splitlines()[-1]))


def scale_table(results: dict[str, Any]) -> str:
    """Name the command and the machine, and make the table of wrapping time, host time per unit, and memory."""
    local = {row["units"]: row["step"] for row in results["rows"] if row["name"] == "local"}
    rows = [
        [
            f"{IMPLEMENTATIONS[row['name']]}",
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
    parser.add_argument("--here", nargs=3, metavar=("NAME", "RANKS", "UNITS"), help="measure one in this process")
    args = parser.parse_args(argv)
    if args.here:
        name, world, units = args.here
        print(json.dumps(measure_here(name, int(world), int(units))))
        return
    found: dict[tuple[str, int, int], list[dict[str, float]]] = {}
    for index in range(args.rounds):
        for units in args.units:
            for name in dict.fromkeys(["local", *args.only]):
                for world in args.ranks if name != "local" else args.ranks[:1]:
                    one = _measure(name, world, units)
                    found.setdefault((name, world, units), []).append(one)
                    what = f"round {index + 1}: {name}, {units} units, {world} ranks"
                    print(f"{what}: {1e3 * one['step']:.1f} ms a step", flush=True)
    # Take the minimum of everything: other load on the machine can only add.
    rows = [
        {"name": name, "world": world, "units": units, **{key: min(one[key] for one in some) for key in some[0]}}
        for (name, world, units), some in found.items()
    ]
    flags = {"ranks": args.ranks, "units": args.units, "rounds": [args.rounds]}
    flags |= {"only": args.only} if args.only != list(NAMES) else {}
    command = " ".join(["python -m benchmarks.scale", *(" ".join([f"--{k}", *map(str, v)]) for k, v in flags.items())])
    results = {"rows": rows, "command": command, "where": where()}
    save_results(args.out, "scale", results, scale_table(results))


if __name__ == "__main__":
    main()
