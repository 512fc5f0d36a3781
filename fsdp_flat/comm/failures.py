"""What ranks of a gloo group tell each other by its store once a collective has failed: where each was, and why.

gloo itself says on every rank but one that a connection was closed or that nothing came in time. A group's store goes
on working when its connections do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm._torch import group_store
from fsdp_flat.comm.rank_groups import RankGroup, moves_by_gloo
from fsdp_flat.errors import PeerFailureError

__all__ = ["WatchedWork", "failure_error", "report_failure"]

_logger = logging.getLogger("fsdp_flat")
PATIENCE_S = 10.0
# By name of a group, how often this process has stopped in it, and where its reason is still to be read. They belong to
# the process's place in a group, which outlives models.
_num_failures: dict[str, int] = {}
_reported: set[str] = set()
# Ranks whose connections broke come here one after the other.
REPORT_TIMEOUT_S = 3.0
_POLL_INTERVAL_S = 0.1
_TEXT_LENGTH = 2000


def report_failure(rank_group: RankGroup, text: str) -> None:
    """Leave the reason why this rank has stopped for the others of the group; they read it if a collective fails.

    Does nothing where no CPU tensors move by gloo.

    Args:
        group: the ranks.
        text: what has happened, to go after "rank 1".
    """
    # A store that is gone, as its host has ended, hinders nobody from raising what there is to raise.
    with suppress(Exception):
        if rank_group.group is not None and moves_by_gloo(rank_group.group, torch.device("cpu")):
            name = rank_group.group.group_name
            number = _num_failures[name] = _num_failures.get(name, 0) + 1
            _reported.add(name)
            group_store(rank_group.group).set(_key(rank_group.rank), f"{number} {text[:_TEXT_LENGTH]}")


def clear_failure(rank_group: RankGroup) -> None:
    """Take back what :func:`report_failure` left, if anything: this rank goes on."""
    if _reported and rank_group.group is not None and rank_group.group.group_name in _reported:
        _reported.discard(rank_group.group.group_name)
        with suppress(Exception):
            group_store(rank_group.group).delete_key(_key(rank_group.rank))


def failure_error(rank_group: RankGroup, doing: str, error: Exception) -> PeerFailureError:
    """What to raise where a collective has failed, with what the other ranks have told.

    Args:
        group: the ranks.
        doing: the collective, with its unit.
        error: gloo's own error.
    """
    own = f"was in {doing}"
    report_failure(rank_group, own)
    told = {rank: text for rank, (_, text) in _await_reports(rank_group).items()}
    silent = [rank for rank in range(rank_group.size) if rank != rank_group.rank and rank not in told]
    lines = [f"rank {rank} {text}" for rank, text in told.items()]
    if silent:
        lines.append(f"rank(s) {silent} said nothing: they have ended, hang, or have not come to this collective")
    first = str(error).partition("\n")[0]
    return PeerFailureError(
        f"Rank {rank_group.rank} of the group {own}, which failed ({first}). Of the others: {'; '.join(lines)}. Every rank "
        "must run the same units in the same order, equally often; where another rank has an error, that came first."
    )


def _await_reports(rank_group: RankGroup) -> dict[int, tuple[int, str]]:
    """By rank, what others have told, after a moment in which they may; with the number of their failure."""
    others = [rank for rank in range(rank_group.size) if rank != rank_group.rank]
    until = time.monotonic() + REPORT_TIMEOUT_S
    told = _read_reports(rank_group, others)
    while len(told) < len(others) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL_S)
        told = _read_reports(rank_group, others)
    return told


def _read_reports(rank_group: RankGroup, ranks: list[int]) -> dict[int, tuple[int, str]]:
    """By rank, what they have told so far, with the number of their failure."""
    told: dict[int, tuple[int, str]] = {}
    with suppress(Exception):
        assert rank_group.group is not None
        store = group_store(rank_group.group)
        for rank in ranks:
            if store.check([_key(rank)]):
                number, _, text = store.get(_key(rank)).decode(errors="replace").partition(" ")
                told[rank] = int(number), text
    return told


def _key(rank: int) -> str:
    return f"fsdp_flat/failure/{rank}"


class WatchedWork:
    """A ``Work`` of a gloo group that says once what it waits for, and raises the cause where it fails.

    Args:
        work: the work.
        group: the ranks.
        doing: gives the collective, with its unit.
        sources: ranks of the group that it waits for.
    """

    __slots__ = ("_axis", "_doing", "_sources", "_work")

    def __init__(self, work: dist.Work, rank_group: RankGroup, doing: Callable[[], str], sources: list[int]) -> None:
        clear_failure(rank_group)
        self._work = work
        self._axis = rank_group
        self._doing = doing
        self._sources = sources

    def is_completed(self) -> bool:
        """Whether it is over."""
        return bool(self._work.is_completed())

    def wait(self) -> Any:
        """Block until it is over.

        Raises:
            PeerFailureError: it failed: another rank has ended, or nothing came within the group's timeout.
        """
        try:
            has_said = False
            while not self._is_over_soon():
                if self._has_lost_a_rank():
                    raise RuntimeError(f"a rank that it waits for has stopped, found after {PATIENCE_S:.0f} s")
                if not has_said:
                    has_said = True
                    _logger.warning(
                        "rank %d of a group of %d has waited %.0f s for rank(s) %s in %s",
                        self._axis.rank,
                        self._axis.size,
                        PATIENCE_S,
                        self._sources,
                        self._doing(),
                    )
        except RuntimeError as error:
            raise failure_error(self._axis, self._doing(), error) from error

    def _has_lost_a_rank(self) -> bool:
        """Whether a rank that is waited for has stopped where this one has not: it will not come."""
        assert self._axis.group is not None
        own = _num_failures.get(self._axis.group.group_name, 0)
        return any(number > own for number, _ in _read_reports(self._axis, self._sources).values())

    def _is_over_soon(self) -> bool:
        try:
            self._work.wait(timedelta(seconds=PATIENCE_S))
        except RuntimeError as error:
            # What a Work says that goes on; the group's own timeout has another text.
            if "Operation timed out" in str(error):
                return False
            raise
        return True
