"""Measures rank 0's part in a save of a checkpoint by many ranks: ``python -m benchmarks.plans``.

``dcp.save`` gathers a plan from every rank, scatters the plans, gathers the results and broadcasts the metadata; with
cached plans every save but the first leaves the plans out. ``save_checkpoint`` gathers one text. One process makes the
objects of every rank, and does rank 0's work with them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.runner import where
from benchmarks.tables import machine, markdown, save_results
from fsdp_flat.checkpoint.dcp_files import write_files, write_metadata
from fsdp_flat.layout import Interval, boxes
from fsdp_flat.state import BoxedTensor

NOTE = """\
`python -m benchmarks.plans`: the exchanges of ranks that save a checkpoint, tensors apart, and the time of rank 0 for
them on one core: pickles, the global plan and the metadata. One process makes the messages of all; nothing is sent.
"""


def state_of(rank: int, ranks: int, params: int) -> dict[str, Any]:
    """Return one rank's part of a model and of Adam's states: a row of each tensor."""

    def tensor() -> BoxedTensor:
        row = boxes((ranks, 4), Interval(4 * rank, 4 * rank + 4))
        return BoxedTensor((ranks, 4), row, [torch.zeros(1, 4)], torch.float32, torch.device("cpu"))

    names = [f"model.layers.{index}.weight" for index in range(params)]
    states = {name: {"exp_avg": tensor(), "exp_avg_sq": tensor()} for name in names}
    return {"model": {name: tensor() for name in names}, "optim": {"state": states}}


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    return call(), time.process_time() - begun


def _row(exchange: str, payloads: list[bytes], seconds: float) -> list[Any]:
    return [exchange, sum(map(len, payloads)), len(payloads), seconds]


class _Planner(dcp.DefaultSavePlanner):
    """Is torch's planner of one of the ranks of this process, whose plans it caches apart from those of others."""

    def __init__(self, rank: int, *, is_cached: bool) -> None:
        super().__init__(enable_plan_caching=is_cached)
        self._cached_plans_key = f"rank {rank}"


def measure_dcp(ranks: int, params: int, path: Path, *, is_cached: bool) -> list[list[Any]]:
    """Go through the steps of ``dcp.save`` for every rank; return name, bytes, objects and seconds of each exchange.

    With ``is_cached`` these are the steps of the second save.
    """

    def begin(rank: int, path: Path) -> tuple[_Planner, dcp.FileSystemWriter, Any]:
        planner, writer = _Planner(rank, is_cached=is_cached), dcp.FileSystemWriter(path)
        planner.set_up_planner(state_of(rank, ranks, params), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return planner, writer, writer.prepare_local_plan(planner.create_local_plan())

    rows: list[list[Any]] = []
    for folder in (path.with_name("first"), path)[not is_cached :]:
        begun = [begin(rank, folder) for rank in range(ranks)]
        plans = [pickle.dumps(plan) for _, _, plan in begun]
        planner, writer, _ = begun[0]

        def merged(planner: _Planner = planner, plans: list[bytes] = plans) -> Any:
            return planner.create_global_plan([pickle.loads(plan) for plan in plans])

        def returned(each: list[Any], writer: dcp.FileSystemWriter = writer) -> list[bytes]:
            return [pickle.dumps(plan) for plan in writer.prepare_global_plan(each)]

        (plans_of_ranks, metadata), merging = _timed(merged)
        sent, returning = _timed(lambda of=returned, each=plans_of_ranks: of(each))
        written = []
        for (other, files, _), plan in zip(begun, sent, strict=True):
            written.append(pickle.dumps(files.write_data(other.finish_plan(pickle.loads(plan)), other).wait()))

        def finish(writer: dcp.FileSystemWriter = writer, metadata: Any = metadata, written: Any = written) -> None:
            writer.finish(metadata, [pickle.loads(results) for results in written])

        _, finishing = _timed(finish)
        spread, spreading = _timed(lambda metadata=metadata: [pickle.dumps(metadata)])
        name = "dcp.save, cached plans" if is_cached else "dcp.save"
        rows = [
            _row(f"{name}: plans to rank 0", plans, merging),
            _row(f"{name}: plans from rank 0", sent, returning),
            _row(f"{name}: results to rank 0", written, finishing),
            _row(f"{name}: metadata from rank 0 to all", spread, spreading),
        ]
    return rows


def measure_texts(ranks: int, params: int, path: Path) -> list[list[Any]]:
    """Do the same as ``save_checkpoint`` does it, for every rank."""
    rows = [write_files(state_of(rank, ranks, params), path, rank, lambda _: None)[0] for rank in range(ranks)]
    # A rank's text also has the sizes of its files.
    sent = [json.dumps([each, {}, ""]).encode() for each in rows]
    _, seconds = _timed(lambda: write_metadata([json.loads(each)[0] for each in sent], path))
    return [_row("save_checkpoint: texts to rank 0", sent, seconds)]


def plans_table(results: dict[str, Any]) -> str:
    """Make the table of bytes and seconds by exchange."""
    cells = [(name, size / count / 1e3, size / 1e6, seconds) for name, size, count, seconds in results["rows"]]
    rows = [[name, f"{each:.0f}", f"{total:.0f}", f"{seconds:.1f}"] for name, each, total, seconds in cells]
    setting = f"{results['ranks']} ranks with a part of each of {results['params']} parameters and their Adam states."
    header = ["exchange", "KB of one object", "MB in all", "CPU s of rank 0"]
    return f"{setting}\n{machine(results)}\n{markdown(header, rows)}"


def main(argv: list[str] | None = None) -> None:
    """Measure both ways; write JSON and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--params", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        # Plans that torch caches stay alive, and the garbage collector looks at them in what is measured after them.
        texts = measure_texts(args.ranks, args.params, Path(folder, "texts"))
        rows = measure_dcp(args.ranks, args.params, Path(folder, "dcp"), is_cached=False)
        rows += measure_dcp(args.ranks, args.params, Path(folder, "cached"), is_cached=True)
        rows += texts
    results = {"ranks": args.ranks, "params": args.params, "rows": rows, "where": where()}
    save_results(args.out, "plans", results, plans_table(results))


if __name__ == "__main__":
    main()
