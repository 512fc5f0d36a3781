"""A step of one rank never waits for the device, takes the same memory every time, and orders its streams."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.counting import Counter
from tests.gpu.accelerator import NO_ACCELERATOR, ON_ACCELERATOR, forbid_waits, on_devices
from tests.gpu.one_rank import EVERY, OneRank, pretended_group

SOME = [("full_shard", "originals"), ("bf16", "flat"), ("pairs", "fully_shard")]
STEPS_BEFORE, STEPS = 2, 4


@pytest.fixture(autouse=True, scope="module")
def one_of_many() -> Iterator[None]:
    """Pretend to be one of many ranks."""
    with pretended_group():
        yield


@on_devices("way, front", EVERY, SOME)
def test_the_host_does_not_wait_for_the_device_in_a_step(where: str, way: str, front: str) -> None:
    rank = OneRank(where, way, front)
    for _ in range(STEPS_BEFORE):
        rank.step()
    with forbid_waits(rank.device):
        rank.step()


@pytest.mark.parametrize("where", [pytest.param("accelerator", marks=ON_ACCELERATOR)])
def test_a_wait_is_seen(where: str) -> None:
    rank = OneRank(where)
    if rank.device.type != "cuda":
        pytest.skip("only CUDA can forbid waits")
    with pytest.raises(RuntimeError, match="synchroniz"), forbid_waits(rank.device):
        torch.ones((), device=rank.device).item()


# The count of bytes on the CPU looks at every object there is, and torch has one that warns when it is looked at.
@pytest.mark.filterwarnings("ignore:.*reduce_op. is deprecated:FutureWarning")
@on_devices("way, front", EVERY, SOME)
def test_every_step_after_the_second_takes_the_same_memory(where: str, way: str, front: str) -> None:
    rank = OneRank(where, way, front)
    for _ in range(STEPS_BEFORE):
        rank.step()
    held = held_and_peaks(rank)
    assert held[0][1] > held[0][0] > 0
    assert held == held[:1] * STEPS


def held_and_peaks(rank: OneRank) -> list[tuple[int, int]]:
    """Return the bytes held after each step and the most held in it."""
    found = []
    if rank.device.type == "cpu":
        with Counter() as counter:
            for _ in range(STEPS):
                counter.peak = 0
                rank.step()
                found.append((counter.alive(), counter.peak))
        return found
    if rank.device.type != "cuda":
        pytest.skip("no statistics of memory")
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats(rank.device)
        rank.step()
        torch.cuda.synchronize()
        found.append((torch.cuda.memory_allocated(rank.device), torch.cuda.max_memory_allocated(rank.device)))
    return found


def ran(where: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the program of one rank, on an accelerator with the sanitizer."""
    checked = {"TORCH_CUDA_SANITIZER": "1"} if where == "accelerator" else {}
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.one_rank", "--where", where, *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **checked},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )


# On an accelerator, with the sanitizer, it is a part of its own of ``python -m tests.gpu``.
@pytest.mark.from_size("cover", "trains in every way in a process of its own")
def test_every_way_trains_on_the_cpu() -> None:
    done = ran("cpu", "--steps", "1")
    assert done.returncode == 0, done.stdout
    assert f"{len(EVERY)} steps trained" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_ACCELERATOR)
def test_the_sanitizer_finds_a_race_that_was_planted() -> None:
    done = ran("accelerator", "--race", "--ways", "full_shard")
    assert done.returncode != 0
    assert "CSAN" in done.stdout
