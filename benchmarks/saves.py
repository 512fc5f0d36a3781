"""Compares ``save_checkpoint`` with ``dcp.save`` and ``dcp.async_save``: ``python -m benchmarks.saves``.

Both planners of ``dcp`` cache their plans. All ways write the same boxes, those of one model and of Adam's states,
alternately, each into a new folder on one disk. A background save is measured until it returns, and until it has ended.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.implementations import quiet
from benchmarks.runner import on_ranks, where
from benchmarks.spec import IMPLEMENTATIONS, PRESETS, Setting
from benchmarks.tables import machine, markdown, save_results
from benchmarks.worker import Training
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, save_checkpoint

NOTE = """\
`python -m benchmarks.saves`: milliseconds of rank 0, medians of {rounds} rounds after one that is left out; until the
call returns, and until the files are complete. dcp caches its plans; all write the same model and Adam's states.
"""
WAYS = ("save_checkpoint", "dcp.save", "save_checkpoint, background", "dcp.async_save")


def _ways(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Callable[[int], Any]]:
    """Return by name a function that saves a checkpoint of a number; of those in the background, what to wait for."""
    boxes = ShardedStateDictConfig(boxes=True), ShardedOptimStateDictConfig(boxes=True)
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *boxes):
            return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}

    planners = [dcp.DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]
    for at, planner in enumerate(planners):
        planner._cached_plans_key = f"planner {at}"

    def save(number: int) -> None:
        dcp.save(state(), checkpoint_id=folder / f"dcp{number}", planner=planners[0])

    def async_save(number: int) -> Any:
        path = folder / f"async{number}"
        return dcp.async_save(state(), checkpoint_id=path, planner=planners[1], process_group=group).result

    def own(number: int) -> None:
        save_checkpoint(folder / f"own{number}", model, optimizer, step=number)

    def background(number: int) -> Any:
        path = folder / f"background{number}"
        return save_checkpoint(path, model, optimizer, step=number, background=True).wait  # type: ignore[union-attr]

    return dict(zip(WAYS, (own, save, background, async_save), strict=True))


def save_times(rank: int, setting: Setting, rounds: int, folder: str) -> dict[str, list[float]]:
    """Return by way the median seconds until a save returns, and until it has ended. Every rank must call this."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with quiet():
        training = Training(IMPLEMENTATIONS["flat-full-flat"], setting, rank)
        training.step()
        ways = _ways(training.model, training.optimizer, Path(folder))
        for number in range(rounds + 1):
            for name, save in ways.items():
                dist.barrier()
                begun = time.perf_counter()
                wait = save(number)
                returned = time.perf_counter() - begun
                if wait is not None:
                    wait()
                dist.barrier()
                times[name].append((returned, time.perf_counter() - begun))
            if rank == 0:
                for path in Path(folder).iterdir():
                    shutil.rmtree(path)
            dist.barrier()
    return {name: [statistics.median(each) for each in zip(*pairs[1:], strict=True)] for name, pairs in times.items()}


def saves_table(results: dict[str, Any]) -> str:
    """Make the table of milliseconds by way and number of ranks."""
    header = ["milliseconds", *(f"{ranks} ranks, {when}" for ranks in results["ranks"] for when in ("returns", "ends"))]
    rows = [
        [name, *(f"{1e3 * each:.0f}" for found in results["ranks"].values() for each in found[name])] for name in WAYS
    ]
    return f"{NOTE.format(rounds=results['rounds'])}\n{machine(results)}\n\n{markdown(header, rows)}"


def main(argv: list[str] | None = None) -> None:
    """Measure at each number of ranks; write JSON and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saves", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--preset", default="communication", choices=list(PRESETS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    results: dict[str, Any] = {"rounds": args.rounds, "preset": args.preset, "ranks": {}, "where": where()}
    for ranks in args.ranks:
        setting = replace(PRESETS[args.preset], ranks=ranks)
        with tempfile.TemporaryDirectory() as folder:
            results["ranks"][ranks] = on_ranks(save_times, ranks, setting, args.rounds, folder)[0]
    save_results(args.out, "saves", results, saves_table(results))


if __name__ == "__main__":
    main()
