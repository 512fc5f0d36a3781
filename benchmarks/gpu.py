"""Measures one GPU: ``python -m benchmarks.gpu``; ``--device cpu --tiny`` tries every row out without a GPU.

One process is rank 0 of a simulated process group. It trains decoders in bf16 with fp32 master weights and reductions
and fused AdamW. Compute is real; communication is emulated (``benchmarks/link.py``): collectives run in order on a
stream of their own, each for as long as its bytes take on a link of the row's bandwidth, or of ``--gbps``. For torch's
FSDP1 and ``fully_shard`` and for fsdp_flat it measures the time of a step, the time in which the host issues one, and
memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.decoder import Decoder
from benchmarks.gpu_rows import FEW, IMPLEMENTATIONS, ROWS, Row, next_to_run, sharded
from benchmarks.implementations import quiet
from benchmarks.link import CudaStreams, HostStreams, Link, pretended
from benchmarks.runner import in_new_process, where
from benchmarks.spec import peers_of
from benchmarks.tables import markdown, medians, number, ratios

say = partial(print, flush=True)


def measure(name: str, row: Row, device: str, world: int) -> dict[str, float]:
    """Train in this process, as rank 0 of ``world`` simulated ranks.

    Args:
        name: a key of ``IMPLEMENTATIONS``.
        row: what is trained.
        device: ``"cuda"`` or ``"cpu"``.
        world: ranks.

    Returns:
        ``step`` and ``least`` (seconds; median and minimum device time of a step, over steps issued one after the
        other), ``host`` (seconds; median time in which the host issues a step to an idle device), ``peak``,
        ``reserved``, ``held`` (bytes; held after a step), ``drift`` (bytes; maximum minus minimum of ``held`` over
        steps), ``sent`` (bytes on the link a step), ``parameters``. On the CPU, issuing a step includes computing it;
        memory is 0.
    """
    where_to = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    streams = CudaStreams(where_to) if device == "cuda" else HostStreams()
    with pretended(world, Link(world, row.gbps, streams)) as link, quiet():
        return _train(name, row, where_to, link)


def _train(name: str, row: Row, device: torch.device, link: Link) -> dict[str, float]:
    clock = _Clock(device)
    torch.manual_seed(0)
    with device:
        plain = Decoder(row.model)
    num_parameters = sum(param.numel() for param in plain.parameters())
    model = sharded(name, plain, row, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    shape = (row.model.batch, row.model.seq + 1)
    tokens = torch.randint(0, row.model.vocab, shape, generator=generator).to(device)
    is_sharded = IMPLEMENTATIONS[name].is_sharded

    def step() -> None:
        with nullcontext() if is_sharded else torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    del plain
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the model before it was sharded would count as reserved
    for _ in range(row.warmup):
        step()
    clock.synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = link.nbytes
    for _ in range(row.steps):
        clock.mark()
        step()
    clock.mark()
    sent = (link.nbytes - before) / row.steps
    times = clock.seconds_between_marks()
    host, held = [], []
    for _ in range(row.steps):
        clock.synchronize()
        begun = time.perf_counter()
        step()
        host.append(time.perf_counter() - begun)
        held.append(clock.nbytes("allocated_bytes.all.current"))
    clock.synchronize()
    return {
        "step": statistics.median(times),
        "least": min(times),
        "host": statistics.median(host),
        "peak": clock.nbytes("allocated_bytes.all.peak"),
        "reserved": clock.nbytes("reserved_bytes.all.peak"),
        "held": max(held),
        "drift": max(held) - min(held),
        "sent": sent,
        "parameters": num_parameters,
    }


class _Clock:
    """Measures time by events of a CUDA device, or on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, list[Any]()

    def mark(self) -> None:
        """Record the time at which everything issued so far is done."""
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record(torch.cuda.current_stream(self._device))
        else:
            self._marks.append(time.perf_counter())

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds_between_marks(self) -> list[float]:
        """Return the seconds from each mark to the next, once all are reached."""
        self.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self._device.type == "cuda" else b - a for a, b in pairs]

    def nbytes(self, key: str) -> int:
        """Return a figure of the allocator of a CUDA device; 0 on the CPU."""
        return int(torch.cuda.memory_stats(self._device)[key]) if self._device.type == "cuda" else 0


def gpu_table(results: Mapping[str, Any]) -> str:
    """Make the table of one row: medians over rounds, and ratios within a round to the best torch implementation.

    Args:
        results: ``rounds``, a list of {name: figures of :func:`measure`, or ``error``}.
    """
    failed = {name: one["error"] for each in results["rounds"] for name, one in each.items() if "error" in one}
    kept = {"rounds": [{name: each[name] for name in each if name not in failed} for each in results["rounds"]]}
    rows = medians(kept)
    header = ["implementation", "step ms", "least", "x torch", "host ms", "host x torch"]
    header += ["peak MB", "peak x torch", "reserved MB", "held MB", "drift MB"]
    table = []
    for name, row in rows.items():
        peers = peers_of(name, IMPLEMENTATIONS)
        table.append(
            [
                IMPLEMENTATIONS[name].title,
                f"{1e3 * row['step']:.1f}",
                f"{1e3 * min(one[name]['least'] for one in kept['rounds']):.1f}",
                number(ratios(kept, name, peers)),
                f"{1e3 * row['host']:.1f}",
                number(ratios(kept, name, peers, "host")),
                f"{row['peak'] / 1e6:.0f}",
                number(ratios(kept, name, peers, "peak") if row["peak"] else None),
                f"{row['reserved'] / 1e6:.0f}",
                f"{row['held'] / 1e6:.1f}",
                f"{max(one[name]['drift'] for one in kept['rounds']) / 1e6:.1f}",
            ]
        )
    lines = [f"\n{IMPLEMENTATIONS[name].title} failed: `{error}`.\n" for name, error in failed.items()]
    return (markdown(header, table) if table else "") + "".join(lines)


def describe(results: Mapping[str, Any]) -> str:
    """Return the machine, the command and the method, as a paragraph."""
    place = results["where"]
    return (
        f"{results['device']}, driver {results['driver']}, Python {place['python']}, torch {place['torch']}, "
        f"{place['date']}; `{results['command']}`; communication emulated: rank 0 of {results['world']} simulated "
        f"ranks. Rounds of fresh processes.\n"
    )


def row_text(row: Mapping[str, Any]) -> str:
    """Make the title and the table of one row."""
    link = "no link time" if row["gbps"] is None else f"{row['gbps']:g} GB/s"
    num_rounds = len(row["rounds"])
    rounds = "1 round" if num_rounds == 1 else f"{num_rounds} rounds"
    return f"**{row['title']}, {link}, {rounds}**\n\n{gpu_table(row)}"


def gpu_page(results: Mapping[str, Any]) -> str:
    """Make the text and the tables of all rows."""
    return "\n".join([describe(results), *map(row_text, results["rows"].values())])


def _driver() -> str:
    """Return the version of the GPU's driver, or "unknown"."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(words, text=True, capture_output=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main(argv: list[str] | None = None) -> None:
    """Measure in fresh processes; write JSON and tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world", type=int, default=8, help="simulated ranks, over which parameters are sharded")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the command out, in this process")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of fresh processes")
    parser.add_argument("--minutes", type=float, help="measure the rows, rounds and fewer implementations that fit in")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="models and links")
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=None, help="implementations")
    parser.add_argument("--gbps", type=float, help="bandwidth of the link in GB/s for each row, instead of its own")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or "benchmarks/results"),
        help="folder for JSON and tables",
    )
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the command out")
    if args.gbps is not None and args.gbps <= 0:
        parser.error(f"--gbps is a bandwidth above 0, got {args.gbps:g}")
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes is a time above 0, got {args.minutes:g}")
    few = FEW if args.minutes is not None else tuple(IMPLEMENTATIONS)
    rows: dict[str, Row] = {}
    names: dict[str, list[str]] = {}
    for key in args.rows:
        row = ROWS[key].tiny() if args.tiny else ROWS[key]
        rows[key] = row if args.gbps is None else replace(row, gbps=args.gbps)
        names[key] = [name for name in row.names if name in (args.only or few)]
    results: dict[str, Any] = {
        "rows": {},
        "world": args.world,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "driver": _driver() if args.device == "cuda" else "none",
        "command": " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)]),
        "where": where(),
    }
    until = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    done = {key: 0 for key in rows if names[key]}
    expected = {key: rows[key].seconds * len(names[key]) for key in done}
    seconds = dict(expected)
    # Round by round, so that a device that slows down affects every row, and rows of less weight are measured too.
    while (key := next_to_run(done, seconds, until - time.monotonic(), args.rounds)) is not None:
        row, begun = rows[key], time.monotonic()
        say(f"-- {key}")
        found: dict[str, Any] = {}
        # Reverse every other round, so that a device that slows down affects every implementation.
        for name in names[key][:: -1 if done[key] % 2 else 1]:
            arguments = name, row, args.device, args.world
            try:
                found[name] = one = measure(*arguments) if args.tiny else in_new_process(measure, *arguments)
                figures = f"{1e3 * one['step']:.1f} ms a step, {1e3 * one['host']:.1f} ms of the host"
                figures += f", {one['peak'] / 1e6:.0f} MB"
            except Exception as error:  # of memory, or of a row that an implementation cannot run
                if args.tiny:
                    raise
                figures = f"{type(error).__name__}: {error}".splitlines()[0]
                found[name] = {"error": figures}
            say(f"round {done[key] + 1} {name}: {figures}")
        measured = results["rows"].setdefault(key, {**asdict(row), "rounds": []})
        measured["rounds"].append({name: found[name] for name in names[key]})
        done[key] += 1
        seconds[key] = time.monotonic() - begun
        # Where one row takes longer than expected, so will the others.
        pace = max(1.0, *(seconds[other] / expected[other] for other, count in done.items() if count))
        seconds.update({other: pace * expected[other] for other, count in done.items() if not count})
        say(row_text(measured))
        # After each row: nothing is lost if the command is ended.
        name = "gpu" if args.device == "cuda" and not args.tiny else "gpu-trial"  # which no page shows
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{name}.json").write_text(json.dumps(results, indent=1))
        (args.out / f"{name}.md").write_text(gpu_page(results))
    left_out = [key for key, count in done.items() if count == 0]
    if left_out:
        say(f"Left out, since {args.minutes:g} minutes are too short for them: {', '.join(left_out)}.")
    say(describe(results))


if __name__ == "__main__":
    main()
