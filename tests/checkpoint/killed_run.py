"""A training run that saves at every step and goes on from the newest checkpoint: what the test of kills runs."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support.worker import print_to

NUM_STEPS = 6
WIDTH = 256


def run(directory: str, *, background: bool) -> dict[int, str]:
    """Train to the end from the newest checkpoint; by step, the loss as it was printed."""
    rank = dist.get_rank()
    losses: dict[int, str] = {}
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = FSDP(nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Loading step-.*passed over")
        found = load_checkpoint(directory, model, optimizer)
    saving = None
    for step in range(0 if found is None else found.extra["next"], NUM_STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses[step] = repr(float(loss.detach()))
        print(step, losses[step], flush=True)
        if saving is not None:
            saving.wait()
        saving = save_checkpoint(directory, model, optimizer, {"next": step + 1}, step=step, background=background)
    if saving is not None:
        saving.wait()
    return losses


COMMITS = ["before the rename", "after the rename"]


def kill_at_second_commit(*, after: bool) -> None:
    """Have the process that commits kill itself at the rename that makes the second checkpoint a whole one."""
    replace, commits = os.replace, itertools.count(1)

    def replace_or_die(source: Path, target: Path) -> None:
        dies = str(source).endswith(".writing") and next(commits) == 2
        if after or not dies:
            replace(source, target)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_or_die  # type: ignore[assignment]


def main(rank: int, store: str, directory: str, how: str, log: str) -> None:
    """One rank of a run of its own; it prints a line per step to the file ``log``."""
    print_to(log)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    if how in COMMITS:
        kill_at_second_commit(after=how == COMMITS[1])
    run(directory, background=how == "background")
    dist.barrier()
    os._exit(0)
