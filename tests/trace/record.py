"""Runs programs and writes what they did: ``python tests/trace/record.py OUT [PART OF A NAME]``.

Uses the fsdp_flat of PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

sys.path.insert(1, str(Path(__file__).parent))
from programs import PROGRAMS, Program
from states import STATES, loaded, record

from benchmarks.counting import Counter
from fsdp_flat.composable import trace
from fsdp_flat.extras import clean_tensor_name

# Number of ranks that load the files of other numbers of ranks.
READERS = 3


class Collectives(Counter):
    """Counts bytes, and lists each collective with the bytes of its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []

    def _count(self, name: str, args: Any) -> None:
        super()._count(name, args)
        tensors = [each for each in torch.utils._pytree.tree_leaves(args[0]) if isinstance(each, torch.Tensor)]
        self.listed.append(f"{name} {sum(each.nbytes for each in tensors)}")


def run(program: Program) -> dict[str, Any]:
    """Run a program on this rank; return its record."""
    model = program.built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Collectives() as counted, trace(model) as events:
        program.train(model, optimizer)
        counted.peak = max(counted.peak, counted.alive())
    digest = hashlib.sha256()
    for name, param in model.named_parameters():
        local = getattr(param, "_local_tensor", param).detach()
        digest.update(clean_tensor_name(name).encode() + local.contiguous().view(-1).numpy().tobytes())
    return {
        "events": [" ".join(event) for event in events],
        "collectives": counted.listed,
        "sent": round(counted.sent),
        "peak": counted.peak,
        "weights": digest.hexdigest(),
    }


def work_of(num_ranks: int, folder: Path, part: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return by name, which contains ``part``, what ``num_ranks`` ranks run.

    Ranks of :data:`READERS` load the files that the others have saved.
    """
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, program in PROGRAMS.items():
        if program.num_ranks == num_ranks:
            found[name] = partial(run, program)
    for name, case in STATES.items():
        if case.num_ranks == num_ranks:
            found[name] = partial(record, case, name, folder)
        elif num_ranks == READERS and case.takes_files:
            found[f"{name}, loaded on {READERS}"] = partial(loaded, case, name, folder)
    return {name: work for name, work in found.items() if part in name}


def run_rank(rank: int, num_ranks: int, store: str, out: str, part: str) -> None:
    """Run everything of ``num_ranks`` ranks one after another, and write this rank's records."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the count of bytes looks at every object
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks))
    found: dict[str, Any] = {}
    for name, work in work_of(num_ranks, Path(store).parent, part).items():
        try:
            found[name] = work()
        except Exception:
            found[name] = {"failed": traceback.format_exc().splitlines()[-3:]}
        dist.barrier()
    Path(f"{out}.{num_ranks}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(out: str, part: str = "") -> None:
    """Run the programs with ``part`` in their name, and write the records of all ranks, by program, to ``out``."""
    merged: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (*sorted({program.num_ranks for program in (*PROGRAMS.values(), *STATES.values())}), READERS):
            parts = f"{folder}/part"
            processes.spawn(run_rank, (num_ranks, f"{folder}/store{num_ranks}", parts, part), nprocs=num_ranks)
            for rank in range(num_ranks):
                for name, record in json.loads(Path(f"{parts}.{num_ranks}.{rank}").read_text()).items():
                    merged.setdefault(name, []).append(record)
    Path(out).write_text(json.dumps(merged))


if __name__ == "__main__":
    main(*sys.argv[1:])
