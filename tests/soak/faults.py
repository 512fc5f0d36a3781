"""The faults of the soak: what is done to a rank or to the disk, and what the other ranks must say about it."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

LIMIT_S = 10.0


@dataclass(frozen=True)
class Fault:
    """Describes one fault.

    ``strike`` gets the processes, the one to hit and the directory of checkpoints. ``told`` is a pattern that each
    surviving rank must print, with ``{victim}`` for the rank; None if the run must go on. ``leaves_all`` if all ranks
    survive, ``is_silent`` if the timeout of the group is the only sign.
    """

    name: str
    strike: Callable[[list[BaseProcess], int, Path], None]
    told: str | None
    leaves_all: bool = False
    is_silent: bool = False

    def said(self, victim: int) -> re.Pattern[str]:
        assert self.told is not None
        return re.compile(self.told.format(victim=victim), re.IGNORECASE)


def _kill(ranks: list[BaseProcess], victim: int, _directory: Path) -> None:
    ranks[victim].kill()


def _stop(ranks: list[BaseProcess], victim: int, _directory: Path) -> None:
    os.kill(ranks[victim].pid or 0, signal.SIGSTOP)


def _slow(ranks: list[BaseProcess], victim: int, directory: Path) -> None:
    for _ in range(3):
        _stop(ranks, victim, directory)
        time.sleep(0.7)
        os.kill(ranks[victim].pid or 0, signal.SIGCONT)
        time.sleep(0.1)


def _fill(_ranks: list[BaseProcess], _victim: int, directory: Path) -> None:
    with filler(directory).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def filler(directory: Path) -> Path:
    """Return the file that fills the disk of ``directory``."""
    return directory.parent / "filler"


_NAMED = r"rank\(?s?\)? \[?([0-9]+, )*{victim}\b[^.]{{0,40}}(ha(s|ve) ended|reported nothing|have not called it)"
FAULTS = (
    Fault("a rank is killed", _kill, _NAMED),
    Fault("a rank stops", _stop, _NAMED, is_silent=True),
    Fault("a rank is slow", _slow, None),
    Fault("the disk is full", _fill, "No space left on device", leaves_all=True),
)


def schedule(rng: random.Random, number: int) -> list[Fault]:
    """Return faults in random order, each kind as often as the others."""
    faults = [FAULTS[at % len(FAULTS)] for at in range(number)]
    rng.shuffle(faults)
    return faults
