"""A rank is killed in the middle of a save: training goes on from the last whole checkpoint, as if it had not been."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.killed_run import COMMITS, NUM_STEPS, main, run
from tests.support import Ranks
from tests.support.pool import SERVER, start_server

LIMIT_S = 120.0


class Run:
    """Two ranks of ``killed_run``."""

    def __init__(self, root: Path, name: str, directory: Path, how: str) -> None:
        start_server()
        self.logs = [root / f"{name}-{rank}.log" for rank in range(2)]
        store = str(root / f"{name}.store")
        self.ranks = [
            SERVER.Process(target=main, args=(rank, store, str(directory), how, str(log)))
            for rank, log in enumerate(self.logs)
        ]
        for process, log in zip(self.ranks, self.logs, strict=True):
            log.touch()
            process.start()

    def kill_when(self, moment: Callable[[], bool], victim: int) -> None:
        """SIGKILL one rank at the moment, and then the other, which may be waiting for it."""
        stop = time.monotonic() + LIMIT_S
        try:
            while not moment():
                assert time.monotonic() < stop, self.text()
                assert all(rank.exitcode is None for rank in self.ranks), self.text()
            self.ranks[victim].kill()
            time.sleep(0.2)
        finally:
            self.end()

    def end(self) -> None:
        """SIGKILL what is left."""
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def finish(self) -> None:
        try:
            for rank in self.ranks:
                rank.join(LIMIT_S)
                assert rank.exitcode == 0, self.text()
        finally:
            self.end()

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def losses(self) -> dict[int, str]:
        lines = [line.split() for line in self.logs[0].read_text().splitlines()]
        return {int(line[0]): line[1] for line in lines if len(line) == 2 and line[0].isdigit()}


def writing(directory: Path, pattern: str) -> Callable[[], bool]:
    """Whether a save has got as far as a file of that name, after at least one whole checkpoint."""

    def reached() -> bool:
        return any(directory.glob("step-????????")) and any(directory.glob(f"step-*.writing{pattern}"))

    return reached


MOMENTS = {"foreground": ["/__?_0.distcp", "/__1_0.distcp"], "background": ["", "/__1_0.distcp"]}


@pytest.mark.parametrize("how", MOMENTS)
def test_training_goes_on_bit_for_bit_after_kills_in_the_middle_of_saves(
    ranks: Callable[..., Ranks], how: str, tmp_path: Path
) -> None:
    directory = tmp_path / "killed"
    seen: dict[int, str] = {}
    for index, moment in enumerate(MOMENTS[how]):
        cut_off = Run(tmp_path, f"{how}{index}", directory, how)
        cut_off.kill_when(writing(directory, moment), victim=index % 2)
        for step, loss in cut_off.losses().items():
            # A step that is done again after a kill has the same loss.
            assert seen.setdefault(step, loss) == loss
    assert_it_ends_as_if_undisturbed(Run(tmp_path, "last", directory, how), seen, tmp_path, ranks)


@pytest.mark.parametrize("how", COMMITS)
def test_a_rank_killed_at_the_commit_leaves_a_whole_checkpoint(
    ranks: Callable[..., Ranks], how: str, tmp_path: Path
) -> None:
    cut_off = Run(tmp_path, "cut_off", tmp_path / "killed", how)
    cut_off.ranks[0].join(LIMIT_S)
    killed_itself = cut_off.ranks[0].exitcode == -signal.SIGKILL
    cut_off.end()
    assert killed_itself, cut_off.text()
    last = Run(tmp_path, "last", tmp_path / "killed", "foreground")
    seen = cut_off.losses()
    assert sorted(seen) == [0, 1]
    assert_it_ends_as_if_undisturbed(last, seen, tmp_path, ranks)
    assert min(last.losses()) == (2 if how == "after the rename" else 1), "the first step after the newest checkpoint"


def assert_it_ends_as_if_undisturbed(
    last: Run, seen: dict[int, str], folder: Path, ranks: Callable[..., Ranks]
) -> None:
    """Let a last run end; with what was seen before, all losses are those of a run that nobody killed."""
    last.finish()
    for step, loss in last.losses().items():
        assert seen.setdefault(step, loss) == loss
    assert seen == ranks(2).run(run, str(folder / "undisturbed"), background=False)[0]
    assert sorted(seen) == list(range(NUM_STEPS))
    assert not list((folder / "killed").glob("*.writing"))
