"""What a unit and a rank cost: ``python -m benchmarks.scale``.

A group of torch's "fake" backend lets one process be rank 0 of any number of ranks: nothing is sent and
the results are not right, so what remains is host time and memory. Models are small enough that kernels cost next
to nothing.
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
from benchmarks.tables import markdown

__all__ = ["NOTE", "main", "measure_here", "scale_table"]

NOTE = (
    "A group that only pretends to communicate, tiny models, one process as rank 0. Host time is the least CPU time of "
    "a forward and backward, over all rounds, over that of the unwrapped model. FSDP1's growth with the ranks is the "
    "list of one tensor a rank that its gather takes on the CPU; on accelerators it gathers into one tensor.\n"
)

NAMES = ("local", "fsdp1-full-flat", "fsdp1-full-orig", "fsdp2", "flat-full-flat", "flat-full-orig")


def setting_for(units: int) -> Setting:
    """A model of ``units`` blocks and an outermost unit, all tiny."""
    return Setting(layers=units - 1, width=16, heads=2, vocab=32, seq=4, batch=1)


def measure_here(name: str, world: int, units: int, steps: int = 15) -> dict[str, float]:
    """Wrap and train in this process, as rank 0 of ``world`` pretended ranks.

    Returns:
        ``wrap`` and ``step`` (seconds; the lowest CPU time of a step without optimizer), ``held`` (bytes by
        which the resident memory grew from before wrapping to after the steps).
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
        begun = time.perf_counter()
        with quiet():
            wrapped = wrap(name, model, setting)
            wrap_s = time.perf_counter() - begun
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
    """Work that is over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _move_nothing() -> None:
    """The "fake" backend still copies into every slice of a gather, one by one, which is no cost of a library."""
    from fsdp_flat.comm import _torch

    def nothing(*_: Any, **__: Any) -> _Done:
        return _Done()

    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(_torch, name, nothing)
        setattr(dist, name, nothing)
    for name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, nothing)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _measure(name: str, world: int, units: int) -> dict[str, float]:
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--here", name, str(world), str(units)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(out.stdout.splitlines()[-1]))


def scale_table(results: dict[str, Any]) -> str:
    """Markdown: wrapping, host time a unit and step over plain training, memory, by implementation, units and ranks."""
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
    return markdown(["implementation", "units", "ranks", "wrap ms a unit", "host ms a unit and step", "MB held"], rows)


def main(argv: list[str] | None = None) -> None:
    """Measure every combination in a process of its own; write JSON and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4096])
    parser.add_argument("--units", type=int, nargs="+", default=[25, 200])
    parser.add_argument("--rounds", type=int, default=3, help="times that every combination is measured, in turns")
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
    # The least of everything: what else the machine does can only add.
    rows = [
        {"name": name, "world": world, "units": units, **{key: min(one[key] for one in some) for key in some[0]}}
        for (name, world, units), some in found.items()
    ]
    results = {"rows": rows, "where": where()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scale.json").write_text(json.dumps(results, indent=1))
    (args.out / "scale.md").write_text(scale_table(results))
    print(scale_table(results))


if __name__ == "__main__":
    main()
