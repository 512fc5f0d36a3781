"""Exchanges failure reports through the store of a gloo group once a collective has failed.

On every rank but one, gloo itself reports only a closed connection or a timeout. A group's store keeps working when
the group's connections fail.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm._torch import group_store
from fsdp_flat.comm.rank_groups import RankGroup, moves_by_gloo
from fsdp_flat.errors import PeerFailureError

_logger = logging.getLogger("fsdp_flat")
# Time after which a rank logs which other ranks it waits for.
WARN_AFTER_S = 10.0
# By group name: the number of this process's failures in the group, and whether its report is still in the store.
# Process-wide, because a group outlives models.
_num_failures: dict[str, int] = {}
_reported: set[str] = set()
_unit_names: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]] = weakref.WeakKeyDictionary()
# Ranks notice broken connections one after the other, so reports arrive over some time.
REPORT_TIMEOUT_S = 3.0
_POLL_INTERVAL_S = 0.1
_TEXT_LENGTH = 2000
_ADVICE = (
    "Every rank must run the same units in the same order, equally often; where another rank has an error, that came "
    "first."
)


def unit_names(group: dist.ProcessGroup) -> dict[int, str]:
    """Return the names of units by id, for error texts of collectives over ``group``; callers add theirs."""
    return _unit_names.setdefault(group, {})


def log_wait(rank: int, sources: Sequence[int], collective: str) -> None:
    """Log that ``rank`` of a group has waited :data:`WARN_AFTER_S` seconds for other ranks."""
    text = "rank %d of the group has waited %.0f s for rank(s) %s in %s"
    _logger.warning(text, rank, WARN_AFTER_S, sources, collective)


def report_failure(rank_group: RankGroup, text: str, *, follows: bool = False) -> None:
    """Publish the reason why this rank has failed in the group's store, for other ranks whose collective fails.

    Does nothing unless the group moves CPU tensors by gloo.

    Args:
        rank_group: the ranks.
        text: the reason, worded to follow "rank 1".
        follows: another rank's failure is the reason, so that an earlier report of this rank stays.
    """
    # The caller raises its own error, also if the store is gone because its host process has ended.
    with suppress(Exception):
        if rank_group.group is not None and moves_by_gloo(rank_group.group, torch.device("cpu")):
            name = rank_group.group.group_name
            if follows and name in _reported:
                return
            text = text.removesuffix(_ADVICE).rstrip(". ")
            number = _num_failures[name] = _num_failures.get(name, 0) + 1
            _reported.add(name)
            group_store(rank_group.group).set(_key(rank_group.rank), f"{number} {text[:_TEXT_LENGTH]}")


def clear_failure(rank_group: RankGroup) -> None:
    """Delete this rank's report from :func:`report_failure`, if any, because it continues."""
    if _reported and rank_group.group is not None and rank_group.group.group_name in _reported:
        _reported.discard(rank_group.group.group_name)
        with suppress(Exception):
            group_store(rank_group.group).delete_key(_key(rank_group.rank))


def failure_error(rank_group: RankGroup, collective: str, error: Exception) -> PeerFailureError:
    """Create the error for a failed collective, with the reports of the other ranks.

    Args:
        rank_group: the ranks.
        collective: the collective, with its unit.
        error: gloo's error.
    """
    own = f"was in {collective}"
    report_failure(rank_group, own)
    reports = {rank: text for rank, (_, text) in _await_reports(rank_group).items()}
    missing = [rank for rank in range(rank_group.size) if rank != rank_group.rank and rank not in reports]
    lines = [f"rank {rank} {text}" for rank, text in reports.items()]
    if missing:
        lines.append(f"rank(s) {missing} said nothing: they have ended, hang, or have not come to this collective")
    # The rest of gloo's text is advice, which does not fit if the other rank says why it failed.
    first = str(error).partition("\n")[0].partition(". ")[0]
    return PeerFailureError(
        f"Rank {rank_group.rank} of the group {own}, which failed ({first}). Of the others: {'; '.join(lines)}. "
        f"{_ADVICE}"
    )


def _await_reports(rank_group: RankGroup) -> dict[int, tuple[int, str]]:
    """Wait briefly for the reports of other ranks, and return (failure count, text) by rank."""
    others = [rank for rank in range(rank_group.size) if rank != rank_group.rank]
    until = time.monotonic() + REPORT_TIMEOUT_S
    reports = _read_reports(rank_group, others)
    while len(reports) < len(others) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL_S)
        reports = _read_reports(rank_group, others)
    return reports


def _read_reports(rank_group: RankGroup, ranks: list[int]) -> dict[int, tuple[int, str]]:
    """Return the reports published so far as (failure count, text) by rank."""
    reports: dict[int, tuple[int, str]] = {}
    with suppress(Exception):
        assert rank_group.group is not None
        store = group_store(rank_group.group)
        for rank in ranks:
            if store.check([_key(rank)]):
                number, _, text = store.get(_key(rank)).decode(errors="replace").partition(" ")
                reports[rank] = int(number), text
    return reports


def _key(rank: int) -> str:
    return f"fsdp_flat/failure/{rank}"


class WatchedWork:
    """Wraps a gloo ``Work``: logs once which ranks it waits for, and raises the cause if it fails.

    Args:
        work: the work.
        rank_group: the ranks.
        collective: returns the name of the collective, with its unit.
        sources: ranks of the group that it waits for.
        raises_early: a failure that one of them has reported ends the wait.
    """

    __slots__ = ("_doing", "_raises_early", "_rank_group", "_sources", "_work")

    def __init__(
        self,
        work: dist.Work,
        rank_group: RankGroup,
        collective: Callable[[], str],
        sources: list[int],
        *,
        raises_early: bool = True,
    ) -> None:
        clear_failure(rank_group)
        self._work = work
        self._rank_group = rank_group
        self._doing = collective
        self._sources = sources
        self._raises_early = raises_early

    def is_completed(self) -> bool:
        """Return whether the work has completed."""
        return bool(self._work.is_completed())

    def wait(self) -> Any:
        """Block until the work has completed.

        Raises:
            PeerFailureError: if it failed: another rank has ended, or sent nothing within the group's timeout.
        """
        try:
            has_said = False
            while not self._is_over_soon():
                if self._raises_early and self._has_failed_peer():
                    raise RuntimeError(f"a rank that it waits for has stopped, found after {WARN_AFTER_S:.0f} s")
                if not has_said:
                    has_said = True
                    log_wait(self._rank_group.rank, self._sources, self._doing())
        except RuntimeError as error:
            raise failure_error(self._rank_group, self._doing(), error) from error

    def _has_failed_peer(self) -> bool:
        """Return whether a source rank has reported more failures than this rank, so that it will send nothing."""
        assert self._rank_group.group is not None
        own = _num_failures.get(self._rank_group.group.group_name, 0)
        return any(number > own for number, _ in _read_reports(self._rank_group, self._sources).values())

    def _is_over_soon(self) -> bool:
        try:
            self._work.wait(timedelta(seconds=WARN_AFTER_S))
        except RuntimeError as error:
            # The error of a Work that is still running; the group's timeout has a different text.
            if "Operation timed out" in str(error):
                return False
            raise
        return True
