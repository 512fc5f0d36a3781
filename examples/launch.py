"""Gives a rank its device and process group; starts the ranks of a job on this machine, for `train_gpt.py --ranks 2`.

Under `torchrun`, which starts ranks the same way, nothing here starts any.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def inside_rank() -> bool:
    """Returns whether this process is one rank of a job, started by torchrun or by `start_ranks`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(script: str, arguments: Sequence[str], num_ranks: int) -> None:
    """Runs a script once per rank and returns when all ranks have succeeded.

    Raises:
        ChildFailedError: a rank raised or was killed. The other ranks have been stopped by then.
    """
    # Ranks that share the cores are faster than ranks that each use all of them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="example",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",
        max_restarts=0,
    )
    elastic_launch(config, sys.executable)(script, *arguments)


def compute_device() -> torch.device:
    """Returns this rank's GPU, and makes it current, if this machine has one for each rank; else the CPU."""
    if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Initializes the default process group for tensors on `device`: gloo for CPUs, NCCL for GPUs.

    Every rank must call this.
    """
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=5))  # a rank that hangs for longer is an error as well
    yield
    dist.destroy_process_group()  # not reached after a failure: the process exits
