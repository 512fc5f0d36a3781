"""Measures collectives alone, by algorithm and size, to choose the algorithm: ``python -m benchmarks.micro``."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.spec import Job, Setting
from fsdp_flat.comm import RankGroup, collectives_for
from fsdp_flat.comm.torch_comm import all_gather_single, reduce_scatter_single

NOTE = """\
Sizes are those of the unsharded buffer. fsdp_flat uses shared memory between ranks of one host. Otherwise it uses
broadcasts for all-gather, and all_to_all and add for reduce-scatter. Send and receive is about as fast as these.
"""

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)


def measure_routes(dtype: torch.dtype = torch.float32, seconds: float = 0.25) -> dict[str, float]:
    """Return median seconds by "algorithm, bytes of the unsharded buffer". Every rank must call this."""
    results = {}
    for nbytes in SIZES:
        routes = _routes(nbytes // dtype.itemsize, dtype)
        times: dict[str, list[float]] = {name: [] for name in routes}
        begun = time.perf_counter()
        # Rank 0 decides when to stop, so that every rank repeats equally often.
        for index in range(64):
            for name, run in routes.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
            done = torch.tensor([index >= 4 and time.perf_counter() - begun > seconds * len(routes)], dtype=torch.int32)
            dist.broadcast(done, 0)
            if done.item():
                break
        results.update({f"{name}, {nbytes}": statistics.median(times[name][1:]) for name in routes})
    return results


def _routes(numel: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    full = torch.zeros(numel, dtype=dtype)
    other = torch.zeros(numel, dtype=dtype)
    parts, sums = full.chunk(size), torch.zeros(numel // size, dtype=dtype)
    peers = [peer for peer in range(size) if peer != rank]
    placed = other.chunk(size)

    def wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    def broadcasts() -> None:
        wait([dist.broadcast(part, source, async_op=True) for source, part in enumerate(parts)])

    def direct() -> None:
        wait([dist.irecv(parts[peer], peer) for peer in peers] + [dist.isend(parts[rank], peer) for peer in peers])

    def exchange() -> None:
        dist.all_to_all_single(other, full)
        torch.add(placed[0], placed[1], out=sums)
        for part in placed[2:]:
            sums.add_(part)

    def direct_sum() -> None:
        wait([dist.irecv(placed[peer], peer) for peer in peers] + [dist.isend(parts[peer], peer) for peer in peers])
        sums.copy_(parts[rank])
        for peer in peers:
            sums.add_(placed[peer])

    host = collectives_for(RankGroup.of(dist.group.WORLD), torch.device("cpu"))
    return {
        "all-gather by shared memory": lambda: host.begin_all_gather(full).wait(),
        "all-gather by all_gather_single": lambda: all_gather_single(full, parts[rank]),
        "all-gather by broadcasts": broadcasts,
        "all-gather by send and receive": direct,
        "reduce-scatter by shared memory": lambda: host.begin_reduce_scatter(full).wait(),
        "reduce-scatter by reduce_scatter_single": lambda: reduce_scatter_single(sums, full),
        "reduce-scatter by all_to_all and add": exchange,
        "reduce-scatter by send and receive, add": direct_sum,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure in fresh processes; print and write a table."""
    from benchmarks.runner import run_processes, where
    from benchmarks.tables import markdown, save_results

    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    columns: dict[str, dict[str, float]] = {}
    for ranks in args.ranks:
        rounds = [run_processes(Job("local", "micro", Setting(ranks=ranks)))[0] for _ in range(args.rounds)]
        for key in rounds[0]:
            route, nbytes = key.rsplit(", ", 1)
            columns.setdefault(route, {})[f"W={ranks}, {_human(int(nbytes))}"] = statistics.median(
                r[key] for r in rounds
            )
    header = ["microseconds", *next(iter(columns.values()))]
    table = markdown(header, [[route, *(f"{1e6 * v:.0f}" for v in row.values())] for route, row in columns.items()])
    save_results(args.out, "micro", {"routes": columns, "where": where()}, table)


def _human(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


if __name__ == "__main__":
    main()
