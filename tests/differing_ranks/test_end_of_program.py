"""A program that ends after a backward in which ranks differed says so in its log, and waits for no rank."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import fully_shard
from fsdp_flat.core.exchange import BackwardExchange
from tests.support.pool import spawn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.order = nn.Linear(8, 8), nn.Linear(8, 8), "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def train(rank: int, case: str, folder: str) -> None:
    """Train on two ranks, of which rank 1 runs other units in the last step, or ends that long after rank 0 has."""
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = "0"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    begin = BackwardExchange.begin

    def begin_late(exchange: BackwardExchange, *args: Any, **options: Any) -> None:
        while not Path(folder, "rank 0 ends").exists():
            time.sleep(0.05)
        begin(exchange, *args, **options)

    net = Net()
    for unit in (net.a, net.b, net):
        fully_shard(unit)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        if step == 2 and rank == 1:
            net.order = "ba" if case == "differ" else "ab"
            if case == "late":
                BackwardExchange.begin = begin_late  # type: ignore[method-assign]
        net(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if case != "late":
        dist.destroy_process_group()


def end(rank: int, case: str, folder: str) -> None:
    """Train, and do in a process that was forked what the end of a program does."""
    with Path(folder, f"log{rank}").open("wb") as log:
        os.dup2(log.fileno(), 2)
    train(rank, case, folder)
    atexit._run_exitfuncs()
    Path(folder, f"rank {rank} ends").touch()
    os._exit(0)


def logs_of_processes(case: str, folder: Path) -> list[str]:
    """Run a case in a process for each rank, and return what each has logged."""
    spawn(end, case, str(folder), num_ranks=2)
    return [(folder / f"log{rank}").read_text() for rank in range(2)]


def logs_of_programs(case: str, folder: Path) -> list[str]:
    """Run a case as a program for each rank, and return what each has logged."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    scripts = [f"from {__name__} import train; train({rank}, {case!r}, {str(folder)!r})" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script], env=environment, stderr=subprocess.PIPE, text=True
        )
        for script in scripts
    ]
    try:
        # gloo itself waits, when the process ends, for what it has begun.
        line = ranks[0].stderr.readline() if case == "late" and ranks[0].stderr else ""
        (folder / "rank 0 ends").touch()
        first, second = (process.communicate(timeout=120)[1] for process in ranks)
        return [line + first, second]
    finally:
        for process in ranks:
            process.kill()


def assert_right(case: str, logs: list[str]) -> None:
    orders = ("of unit 'b', the reduction of unit 'a'", "of unit 'a', the reduction of unit 'b'")
    for rank, (text, order) in enumerate(zip(logs, orders, strict=True)):
        if case == "differ":
            assert text.startswith(
                f"Rank {rank} of the shard group ends, and in the last backward of unit 'Net' ranks ran units in "
                f"different"
            ), text
            assert order in text
            assert "If an optimizer has stepped since, weights are wrong" in text
        elif case == "late" and rank == 0:
            assert text.startswith(
                "Rank 0 of the shard group ends before other ranks have ended the last backward of unit 'Net'"
            ), text
        elif case == "same":
            assert text == ""


def test_ranks_that_differed_in_the_last_backward_log_it(tmp_path: Path) -> None:
    assert_right("differ", logs_of_processes("differ", tmp_path))


def test_ranks_that_ran_the_same_log_nothing(tmp_path: Path) -> None:
    assert_right("same", logs_of_processes("same", tmp_path))


def test_a_rank_that_ends_long_before_another_ends_its_backward_does_not_wait_for_it(tmp_path: Path) -> None:
    assert_right("late", logs_of_processes("late", tmp_path))


@pytest.mark.from_size("all", "starts programs that import torch; the tests above fork them")
@pytest.mark.parametrize("case", ["differ", "same", "late"])
def test_programs_log_the_same(case: str, tmp_path: Path) -> None:
    assert_right(case, logs_of_programs(case, tmp_path))
