"""Waits for other ranks, and finds the cause if a collective on the CPU fails.

gloo reports only a closed connection or a timeout on every rank but one, and a rank that has raised sends nothing at
all. A group's store has connections of its own, so ranks exchange reports of their failures through it. If it cannot be
reached either, ranks go on without reports. A rank that waits for long says for which others, and looks for their
reports and their calls (``calls``).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import ClassVar, TypeVar

import torch.distributed as dist

from fsdp_flat.comm.calls import Progress, StallDetector, calls_of
from fsdp_flat.comm.given_up import (
    REFUSED,
    REPORT,
    Report,
    compare_first,
    is_refusal,
    refrain,
    will_not_come,
)
from fsdp_flat.comm.rank_groups import RankGroup, ended_ranks, is_fake, parent_of
from fsdp_flat.comm.torch_comm import ask_store, leave_time_for_gloo
from fsdp_flat.errors import PeerFailureError, UsageError

Made = TypeVar("Made")
_logger = logging.getLogger("fsdp_flat")
# Time after which a rank logs which other ranks it waits for, and that after which it looks for reports and calls.
WARN_AFTER_S = 10.0
LOOK_AFTER_S = 5.0
LOOK_INTERVAL_S = 1.0
# Ranks notice broken connections one after the other, so reports arrive over some time.
REPORT_TIMEOUT_S = 3.0
_POLL_INTERVAL_S = 0.1
_TEXT_LENGTH = 2000
# In gloo's texts.
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
_ADVICE = (
    "Every rank must run the same units in the same order, equally often; where another rank has an error, that came "
    "first."
)


def report_failure(rank_group: RankGroup, text: str, *, follows: bool = False, is_final: bool = False) -> None:
    """Publish the reason why this rank has failed in the group's store, for other ranks whose collective fails.

    Ranks read it while they wait on the host, which for groups of NCCL they do in the host group. The reason is worded
    to follow "rank 1". If it ``follows`` from another rank's failure, an earlier report of this rank stays. After a
    final one no rank waits for this one, until it makes a call in the group.
    """
    group = rank_group.group
    # The caller raises its own error, also if the store is gone because its host process has ended.
    with suppress(Exception):
        if group is None or is_fake(group):
            return
        group = parent_of(group)
        calls = calls_of(group)
        if follows and calls.report:
            return
        text = text.removesuffix(_ADVICE).rstrip(". ")[:_TEXT_LENGTH]
        calls.num_failures = calls.failures_after(calls.number) + 1
        calls.failed_after = calls.number
        calls.has_failed = True
        calls.error = calls.error or text
        compare_first(group)
        num_failures, number = (REFUSED, -1) if is_final else (calls.num_failures, calls.number)
        calls.report = report = f"{num_failures} {number} {text}"
        ask_store(group, lambda store: store.set(REPORT % rank_group.rank, report))


@contextmanager
def reported_failure(rank_groups: Iterable[RankGroup]) -> Iterator[None]:
    """Have the next collective of other ranks raise with the text of an exception in the block."""
    try:
        yield
    except Exception as error:
        report_error(rank_groups, error)
        raise


def report_error(rank_groups: Iterable[RankGroup], error: BaseException) -> None:
    """Report in each group that this rank has raised an error, which may follow from another rank's."""
    follows, is_final = isinstance(error, PeerFailureError), is_refusal(error)
    for rank_group in rank_groups:
        report_failure(rank_group, f"raised {type(error).__name__}: {error}", follows=follows, is_final=is_final)


def report_left_out(rank_groups: Iterable[RankGroup], text: str) -> None:
    """Report that this rank has left out calls; it compares its next one with those in which other ranks wait."""
    for rank_group in rank_groups:
        report_failure(rank_group, text, follows=True)
        if rank_group.group is not None and not is_fake(rank_group.group):
            calls_of(rank_group.group).left_out = True


def _read_reports(rank_group: RankGroup, ranks: Iterable[int]) -> dict[int, Report]:
    """Return the reports published so far, by rank."""
    reports: dict[int, Report] = {}

    def read(store: dist.Store) -> None:
        for rank in ranks:
            if store.check([REPORT % rank]) and (report := store.get(REPORT % rank).decode(errors="replace")):
                reports[rank] = Report.parsed(report)

    ask_store(parent_of(rank_group.process_group), read)
    return dict(reports)


def has_failed(rank_group: RankGroup, ranks: Iterable[int]) -> bool:
    """Return whether one of ``ranks`` has reported a failure, and has not gone on since."""
    calls = calls_of(rank_group.process_group)
    return any(report.is_newer(calls) for report in _read_reports(rank_group, ranks).values())


def _begun(make: Callable[[], Made]) -> Future[Made]:
    """Begin to call ``make`` in a thread, which ends by the group's timeout only, if a rank is missing."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="fsdp_flat_make", daemon=True).start()
    return made


def while_ranks_live(make: Callable[[], Made], rank_group: RankGroup) -> Made:
    """Return what ``make`` returns, which needs all ranks of a group; raise a PeerFailureError once one has ended."""
    made = _begun(make)
    while not wait([made], LOOK_INTERVAL_S).done:
        if ended := ended_ranks(rank_group):
            raise PeerFailureError(
                f"Rank(s) {ended} of the group have ended or closed their connections while ranks made another group, "
                f"as the first save in the background does. {_ADVICE}"
            )
    return made.result()


def reports_of_others(rank_group: RankGroup, *, timed_out: bool = False) -> str:
    """Wait for the reports of the other ranks, and return a text of them and of the ranks without one.

    If this rank ``timed_out``, gloo has closed its connections, which then do not tell whether other ranks have ended.
    """
    others, until = rank_group.others, time.monotonic() + REPORT_TIMEOUT_S
    while len(reports := _read_reports(rank_group, others)) < len(others) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL_S)
    lines = [f"rank {rank} {report.text}" for rank, report in reports.items()]
    missing = [rank for rank in others if rank not in reports]
    ended = [] if timed_out else [rank for rank in ended_ranks(rank_group) if rank in missing]
    if ended:
        lines.append(f"rank(s) {ended} have ended without a report: look at the end of their output")
        missing = [rank for rank in missing if rank not in ended]
    if missing:
        lines.append(f"rank(s) {missing} reported nothing: they have ended, hang, or have not come to this collective")
    return "; ".join(lines)


def failure_in(collective: str, rank_group: RankGroup, reason: str) -> PeerFailureError:
    """Report that this rank has failed in a collective, and return the error, with the reports of the others."""
    own = f"was in {collective} ({Progress.place})"
    report_failure(rank_group, own)
    refrain(rank_group)
    return PeerFailureError(
        f"Rank {rank_group.rank} of the group {own}, which failed ({reason}). Of the others: "
        f"{reports_of_others(rank_group, timed_out=bool(_TIMED_OUT.search(reason)))}. {_ADVICE}"
    )


def keep_waiting(
    is_over: Callable[[float], bool],
    rank_group: RankGroup,
    sources: Collection[int],
    collective: str,
    *,
    raises_early: bool = True,
) -> None:
    """Go on to wait in a collective for the ranks ``sources`` until ``is_over``, which waits for so many seconds.

    Log that once. Raise a RankMismatchError once a rank waits in another collective, and a PeerFailureError once a
    collective of the group was given up or, if it ``raises_early``, one of the ``sources`` has reported a failure.
    """
    begun = time.monotonic() - min(LOOK_AFTER_S, WARN_AFTER_S)
    is_logged, detector = False, StallDetector(rank_group)
    while True:
        waited = time.monotonic() - begun
        if waited >= WARN_AFTER_S and not is_logged:
            is_logged = True
            text = "rank %d of the group has waited %.0f s for rank(s) %s in %s (%s)"
            _logger.warning(text, rank_group.rank, WARN_AFTER_S, sorted(sources), collective, Progress.place)
        if will_not_come(rank_group, sources, gives_up=raises_early):
            raise failure_in(collective, rank_group, "a rank that it waits for has stopped")
        if (error := detector.difference()) is not None:
            report_failure(rank_group, f"was in {collective} ({Progress.place})")
            raise error
        if is_over(max(LOOK_INTERVAL_S, waited / 10)):
            return


def keep_waiting_in_thread(
    make: Callable[[], object], rank_group: RankGroup, sources: Collection[int], collective: str
) -> None:
    """Wait as :func:`keep_waiting` for a function that blocks, and that no timeout may end: gloo closes connections."""
    made = _begun(make)

    def is_over(seconds: float) -> bool:
        return bool(wait([made], seconds).done)

    if not is_over(min(LOOK_AFTER_S, WARN_AFTER_S)):
        keep_waiting(is_over, rank_group, sources, collective)
    made.result()


def reason_of(error: BaseException) -> str:
    """Return what says most of the text of an error of torch.distributed.

    NCCL puts the place in its source first. The rest of gloo's text is advice, which does not fit if the other rank
    says why it failed.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_nccl = [line for line in lines if line.startswith(("nccl", "Last error"))]
    return "; ".join(of_nccl).rstrip(". ") or (lines[0].partition(". ")[0] if lines else type(error).__name__)


def named(error: BaseException, collective: str, rank_group: RankGroup) -> PeerFailureError:
    """Return an error that says in which collective ``error``, raised by a backend, came, and what others report."""
    return failure_in(collective, rank_group, reason_of(error))


@contextmanager
def named_errors(collective: str, rank_group: RankGroup) -> Iterator[None]:
    """Name the collective in errors of torch.distributed in the block; they stay the cause."""
    try:
        yield
    except dist.DistError as error:
        raise named(error, collective, rank_group) from error


class NamedWork:
    """Wraps a ``Work`` that the backend waits for by itself: errors name the collective (``describe``).

    ``blocks_host`` says whether a wait blocks the host until it is complete, as a caller's collective over gloo does.
    """

    __slots__ = ("blocks_host", "describe", "rank_group", "work")

    def __init__(
        self, work: dist.Work, rank_group: RankGroup, describe: Callable[[], str], *, blocks_host: bool = False
    ) -> None:
        self.work, self.rank_group, self.describe, self.blocks_host = work, rank_group, describe, blocks_host

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Order the current stream after the work, or block until it has completed; raise a PeerFailureError if not."""
        try:
            self.work.wait()
        except dist.DistError as error:
            raise named(error, self.describe(), self.rank_group) from error


def is_over(work: dist.Work, seconds: float) -> bool:
    """Wait for a gloo ``Work`` for so many seconds, and return whether it has ended; raise its error if it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        # The error of a Work that is still running; the group's timeout has a different text.
        if "Operation timed out" in str(error):
            return False
        raise
    return True


@dataclass(slots=True, eq=False)
class WatchedWork:
    """Wraps a gloo ``Work``: logs once which ranks (``sources``) it waits for, and raises the cause if it fails.

    A failure that one of them has reported ends the wait if it ``raises_early``.
    """

    blocks_host: ClassVar[bool] = True
    work: dist.Work
    rank_group: RankGroup
    collective: str
    sources: Sequence[int]
    raises_early: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        leave_time_for_gloo()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def has_failed(self) -> bool:
        """Return whether the work has ended with an error, which ``wait`` would raise."""
        if not self.is_completed():
            return False
        try:
            self.work.wait()  # returns at once; of ``is_success`` torch warns that it is deprecated
        except RuntimeError:
            return True
        return False

    def wait(self) -> None:
        """Block until the work has completed; raise a PeerFailureError if it failed."""
        try:
            if not is_over(self.work, min(LOOK_AFTER_S, WARN_AFTER_S)):
                over, early = partial(is_over, self.work), self.raises_early
                keep_waiting(over, self.rank_group, self.sources, self.collective, raises_early=early)
        except UsageError:
            raise
        except RuntimeError as error:
            raise failure_in(self.collective, self.rank_group, reason_of(error)) from error
