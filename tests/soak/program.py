"""A training run that faults interrupt: what each rank of the soak runs. It saves at every second step."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support.worker import print_to

WIDTH = 64
ROWS = 12  # of a batch of all ranks, a multiple of each number of ranks
TIMEOUT_S = 6.0
FAILED = 3


@dataclass(frozen=True)
class Life:
    """Describes one start of the run, by so many ranks, until it ends or a fault ends it.

    ``pause_s`` is a pause in each step, so that a fault meets a run that is still going.
    """

    number: int
    num_ranks: int
    num_steps: int
    directory: Path
    port: int
    pause_s: float


def train(life: Life) -> dict[str, torch.Tensor]:
    """Train from the newest checkpoint to the end, and return the full weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()
    model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Loading step-.*passed over")
        found = load_checkpoint(life.directory, model, optimizer)
    saving = None
    for step in range(0 if found is None else found.step + 1, life.num_steps):
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
        print("step", step, flush=True)
        time.sleep(life.pause_s)
        if step % 2:
            if saving is not None:
                saving.wait()
            background = step % 4 == 3
            saving = save_checkpoint(life.directory, model, optimizer, step=step, background=background, keep_last=2)
    if saving is not None:
        saving.wait()
    with FSDP.summon_full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def main(rank: int, life: Life, log: Path, result: Path) -> None:
    """Run one rank, which prints to the file ``log``; rank 0 writes the final weights to ``result``."""
    print_to(str(log))
    torch.set_num_threads(1)
    # The store is not a rank's, as with torchrun, so that it outlives every rank.
    store = dist.PrefixStore(str(life.number), dist.TCPStore("localhost", life.port, is_master=False))
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=life.num_ranks, timeout=limit)
    try:
        weights = train(life)
    except BaseException:
        print(f"FAILED at {time.time()}", flush=True)
        traceback.print_exc()
        os._exit(FAILED)
    if rank == 0:
        torch.save(weights, result)
    dist.barrier()
    os._exit(0)
