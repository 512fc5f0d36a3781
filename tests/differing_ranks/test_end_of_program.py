"""A program that ends after a backward in which ranks differed says so in its log, and waits for no rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from fsdp_flat import fully_shard
from fsdp_flat.core.exchange import BackwardExchange

case, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
begin = BackwardExchange.begin

def begin_late(*args, **kwargs):
    while not (folder / "rank 0 ends").exists():
        time.sleep(0.05)
    begin(*args, **kwargs)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.order = nn.Linear(8, 8), nn.Linear(8, 8), "ab"

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x

def main():
    net = Net()
    for unit in (net.a, net.b, net):
        fully_shard(unit)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        if step == 2 and rank == 1:
            if case == "differ":
                net.order = "ba"
            if case == "late":
                BackwardExchange.begin = begin_late
        net(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

main()
if case != "late":
    dist.destroy_process_group()
"""


def ended(case: str, folder: Path) -> tuple[str, str]:
    """Run a case of the script on two ranks, and return what each has logged."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FSDP_FLAT_SHARED_MEMORY": "0"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, case, str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        # gloo itself waits, when the process ends, for what it has begun.
        line = ranks[0].stderr.readline() if case == "late" and ranks[0].stderr else ""
        (folder / "rank 0 ends").touch()
        first, second = (process.communicate(timeout=120)[1] for process in ranks)
        return line + first, second
    finally:
        for process in ranks:
            process.kill()


def test_ranks_that_differed_in_the_last_backward_log_it(tmp_path: Path) -> None:
    orders = ("of unit 'b', the reduction of unit 'a'", "of unit 'a', the reduction of unit 'b'")
    for rank, (text, order) in enumerate(zip(ended("differ", tmp_path), orders, strict=True)):
        begin = (
            f"Rank {rank} of the shard group ends, and in the last backward of unit 'Net' ranks ran units in different"
        )
        assert text.startswith(begin), text
        assert order in text
        assert "If an optimizer has stepped since, weights are wrong" in text


def test_ranks_that_ran_the_same_log_nothing(tmp_path: Path) -> None:
    assert ended("same", tmp_path) == ("", "")


def test_a_rank_that_ends_long_before_another_ends_its_backward_does_not_wait_for_it(tmp_path: Path) -> None:
    text, _ = ended("late", tmp_path)
    assert text.startswith(
        "Rank 0 of the shard group ends before other ranks have ended the last backward of unit 'Net'"
    )
