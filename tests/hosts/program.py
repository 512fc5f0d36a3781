"""A program for the ranks of several hosts, by torchrun: ``-m tests.hosts.program TASK [ARGUMENT]``."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, load_checkpoint, save_checkpoint
from tests.support.beside import OUR_WRAPPERS, Beside
from tests.support.hosts import train_fully_shard_beside_a_replica
from tests.support.kit import BLOCKS, batch, full_params, square_loss, wrapped
from tests.support.models import Stack
from tests.support.steps import STRATEGIES, mesh_for

# Of the group whose ranks wait for a host in vain.
TIMEOUT_S = 10


def say(text: str) -> None:
    """Print a line at once, in one write, so that lines of several ranks stay whole."""
    os.write(1, f"rank {dist.get_rank()}: {text}\n".encode())


def train() -> None:
    """Train every strategy with both values of ``use_orig_params``, and both fronts, beside a plain replica."""
    torch.manual_seed(0)
    for strategy in STRATEGIES:
        for front in OUR_WRAPPERS:
            beside = Beside(Stack(), front, sharding_strategy=strategy, **mesh_for(strategy))
            beside.train(num_steps=3)
    for shape in ((4,), (2, 2)):
        torch.manual_seed(0)
        train_fully_shard_beside_a_replica(shape)
    say("equals the replica")


def trained(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> tuple[FSDP, torch.optim.Optimizer]:
    """Return a model of the same values on every rank, and its optimizer."""
    torch.manual_seed(0)
    groups: Any = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        # Ranks of a host, and those in one position; the groups of a mesh have torch's timeout of 30 minutes.
        made = [
            dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S)) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])
        ]
        groups = tuple(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)
    model = wrapped(Stack(), auto_wrap_policy=BLOCKS, sharding_strategy=strategy, process_group=groups)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: FSDP, optimizer: torch.optim.Optimizer, index: int) -> None:
    """Take one step."""
    optimizer.zero_grad()
    square_loss(model, batch(dist.get_rank(), index)).backward()
    optimizer.step()


def checkpoints(folder: str) -> None:
    """Train, save after the third step and print a digest of the weights after the fifth; resume if there is a save."""
    model, optimizer = trained()
    loaded = load_checkpoint(folder, model, optimizer) if any(Path(folder).iterdir()) else None
    first = 0 if loaded is None else loaded.step + 1
    for index in range(first, 5):
        step(model, optimizer, index)
        if index == 2:
            save_checkpoint(folder, model, optimizer, step=index)
    content = b"".join(param.numpy().tobytes() for param in full_params(model).values())
    say(f"from step {first}: {hashlib.sha256(content).hexdigest()}")


def until_a_failure(strategy: str) -> None:
    """Train until a collective fails, and print which error and after how many seconds without a step."""
    model, optimizer = trained(ShardingStrategy[strategy])
    index = 0
    begun = time.monotonic()
    try:
        while True:
            begun = time.monotonic()
            step(model, optimizer, index)
            index += 1
            if index == 5:
                say("trains")
    except Exception as error:
        say(f"{type(error).__name__} after {time.monotonic() - begun:.1f} s: {' '.join(str(error).split())}")
    # The group cannot be destroyed in order any more.
    os._exit(0)


TASKS: dict[str, Callable[..., None]] = {
    "train": train,
    "checkpoints": checkpoints,
    "until_a_failure": until_a_failure,
}


def main(task: str, *arguments: str) -> None:
    """Run a task on this rank."""
    logging.getLogger("fsdp_flat").setLevel(logging.INFO)
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S if task == "until_a_failure" else 120)
    dist.init_process_group("gloo", timeout=timeout)
    TASKS[task](*arguments)
    dist.barrier()
    with suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
