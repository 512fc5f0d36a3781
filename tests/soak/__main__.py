"""``python -m tests.soak``: train for minutes through kills, stops, slow ranks and full disks, and compare the weights.

A run is started again after each fault, as an elastic launcher does. Every surviving rank must name the fault within
10 seconds, and end; a rank that stops is silent, so the group's timeout of 6 seconds passes first. The final weights
equal those of an undisturbed run, to the bit at one number of ranks, and to 1e-6 where the number of ranks changes from
life to life.

Full disks need root, for a file system of a few megabytes in memory; without it these faults are left out, and said so.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tests.soak.faults import FAULTS, LIMIT_S, Fault, filler, schedule
from tests.soak.program import FAILED, TIMEOUT_S, Life
from tests.soak.program import main as run_rank
from tests.support.pool import SERVER, start_server

START_S = 60.0
NUM_STEPS = 240
PAUSE_S = 0.05


class SoakFailure(Exception):
    """Says what went wrong, with the output of all ranks."""


class Soak:
    """Starts the lives of runs in a folder, and strikes them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._number = 0
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.slowest_s = 0.0
        self.faults: Counter[str] = Counter()

    def run(self, name: str, directory: Path, sizes: list[int], faults: list[Fault]) -> dict[str, torch.Tensor]:
        """Run to the end through ``faults``, with the number of ranks of each life in turn; return the weights."""
        result = self._folder / f"{name}.pt"
        for at in range(len(faults) + 1):
            fault = faults[at] if at < len(faults) else None
            self._live(result, directory, sizes[at % len(sizes)], fault)
        found: dict[str, torch.Tensor] = torch.load(result)
        return found

    def _live(self, result: Path, directory: Path, num_ranks: int, fault: Fault | None) -> None:
        self._number += 1
        pause_s = 0.0 if fault is None else PAUSE_S
        life = Life(self._number, num_ranks, NUM_STEPS, directory, self._store.port, pause_s)
        logs = [self._folder / f"life{life.number}-{rank}.log" for rank in range(num_ranks)]
        ranks: list[BaseProcess] = []
        for rank, log in enumerate(logs):
            log.touch()
            ranks.append(SERVER.Process(target=run_rank, args=(rank, life, log, result)))
            ranks[-1].start()
        try:
            if fault is not None:
                self._strike(fault, ranks, logs, directory)
            else:
                _join(ranks, time.time() + 5 * START_S)
                if any(rank.exitcode for rank in ranks):
                    raise SoakFailure(f"The last life of {result.stem} failed.\n{_text(logs)}")
        finally:
            for each in ranks:
                each.kill()
                each.join()
            filler(directory).unlink(missing_ok=True)

    def _strike(self, fault: Fault, ranks: list[BaseProcess], logs: list[Path], directory: Path) -> None:
        _wait_for_steps(ranks, logs)
        time.sleep(self._rng.uniform(0.0, 1.0))
        victim = self._rng.randrange(len(ranks))
        struck = time.time()
        fault.strike(ranks, victim, directory)
        self.faults[fault.name] += 1
        if fault.told is None:
            _wait_for_steps(ranks, logs, more=4)
            print(f"{fault.name} ({victim} of {len(ranks)}): the run goes on", flush=True)
            return
        survivors = [rank for rank in range(len(ranks)) if fault.leaves_all or rank != victim]
        _join([ranks[rank] for rank in survivors], struck + 3 * LIMIT_S + TIMEOUT_S)
        times = [_failed_at(log) for log in logs]
        for rank in survivors:
            said = fault.said(victim).search(logs[rank].read_text().partition("FAILED at")[2])
            if ranks[rank].exitcode != FAILED or said is None or (late := times[rank]) is None:
                what = f"rank {rank} of {len(ranks)} did not say so and end"
                raise SoakFailure(f"{fault.name} ({victim}): {what}, status {ranks[rank].exitcode}\n{_text(logs)}")
            # A full disk is met at the next save.
            begun = min(each for each in times if each is not None) if fault.leaves_all else struck
            self.slowest_s = max(self.slowest_s, late - begun)
            if late - begun > LIMIT_S + TIMEOUT_S * fault.is_silent:
                raise SoakFailure(f"{fault.name} ({victim}): rank {rank} said so after {late - begun:.1f} s")
        print(f"{fault.name} ({victim} of {len(ranks)}): named by {survivors}", flush=True)


def _join(ranks: list[BaseProcess], until: float) -> None:
    for rank in ranks:
        rank.join(max(0.0, until - time.time()))


def _steps(log: Path) -> int:
    return len(re.findall(r"^step \d+$", log.read_text(), re.MULTILINE))


def _failed_at(log: Path) -> float | None:
    found = re.search(r"^FAILED at ([\d.]+)$", log.read_text(), re.MULTILINE)
    return None if found is None else float(found[1])


def _wait_for_steps(ranks: list[BaseProcess], logs: list[Path], more: int = 3) -> None:
    """Wait until each rank has done ``more`` steps than now; raise if one ends."""
    wanted, until = [_steps(log) + more for log in logs], time.time() + START_S
    while any(_steps(log) < steps for log, steps in zip(logs, wanted, strict=True)):
        if time.time() > until or any(rank.exitcode is not None for rank in ranks):
            raise SoakFailure(f"A rank ended, or took no step for a minute.\n{_text(logs)}")
        time.sleep(0.02)


def _text(logs: list[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)


@contextmanager
def small_disk(folder: Path, megabytes: int = 4) -> Iterator[bool]:
    """Mount a small file system in memory on ``folder``, for root; yields whether it is there."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def soak(num_faults: int, seed: int) -> None:
    """Run both parts, half of the faults in each; raise a SoakFailure."""
    start_server()
    rng = random.Random(seed)
    begun = time.time()
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name, "disk")) as has_disk:
        folder, disk = Path(name), Path(name, "disk")
        told = Soak(folder, seed)
        expected = told.run("undisturbed", folder / "undisturbed", [4], [])

        def faults() -> list[Fault]:
            found = schedule(rng, (num_faults + 1) // 2)
            return [fault for fault in found if has_disk or not fault.leaves_all]

        found = told.run("four ranks", disk / "four", [4], faults())
        if not all(torch.equal(found[key], value) for key, value in expected.items()):
            raise SoakFailure("The weights differ from those of the undisturbed run at four ranks.")
        found = told.run("other ranks", disk / "other", [4, 3, 2], faults())
        apart = max(float((found[key] - value).abs().max()) for key, value in expected.items())
        if apart > 1e-6:
            raise SoakFailure(f"The weights differ by {apart} from those of the undisturbed run, at 4, 3 and 2 ranks.")
    kinds = ", ".join(f"{told.faults[fault.name]} x {fault.name}" for fault in FAULTS)
    if not has_disk:
        print("Left out: full disks, which need root to mount a small file system.")
    print(f"{sum(told.faults.values())} faults in {time.time() - begun:.0f} s: {kinds}.")
    print(f"The last rank to name a fault did so after {told.slowest_s:.1f} s; a group's timeout is {TIMEOUT_S:.0f} s.")
    print(f"Weights: equal to the bit at 4 ranks; at 4, 3 and 2 ranks in turn {apart:.1e} apart at most.")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        soak(args.faults, args.seed)
    except SoakFailure as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
