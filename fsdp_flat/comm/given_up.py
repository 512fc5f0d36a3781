"""Represents asynchronous work, keeps the memory of what was given up, and has ranks compare calls after that.

A rank that raises reports it in the store of each of its groups, and a rank that waits for it gives up (``failures``).
Neither gloo nor another backend can take a collective back: it goes on to write to its output and to send its input,
and takes the next collective of the rank that raised for the missing one. So two rules hold, for every backend:

* What is given up stays referenced here until its works are complete, with its memory.
* A rank that has given up a collective of a group, or that another one has given up to wait for, compares its number of
  calls in the group (``calls``) with those of all other ranks before its next one. If they are equal, each collective
  has found its counterparts, and ranks go on. Else the group is refused on every rank from then on.

A rank that has raised, and that no rank has given up to wait for, goes on at once if it has left out no calls, as in a
program that skips a batch. Else it says which call it makes next, and goes on once each other rank has come to a
comparison too, or has found that it waits in that very call. The store decides whether a rank withdraws its report or
another one marks it, to give up: not both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_flat.comm.calls import Calls, calls_of
from fsdp_flat.comm.rank_groups import RankGroup, ended_ranks, is_fake, parent_of
from fsdp_flat.comm.torch_comm import ask_store, timeout_of
from fsdp_flat.errors import PeerFailureError, RankMismatchError, UsageError

_logger = logging.getLogger("fsdp_flat")
WARN_AFTER_S = 10.0
_LOOK_INTERVAL_S = 1.0
_POLL_INTERVAL_S = 0.1
# Time for works to end in a step that is aborted, and once all ranks have begun them.
_SETTLE_S = 5.0
_COMPLETE_S = 60.0
# Keys in the store of a group: a rank's report of its failure; that a collective was given up since ranks have compared
# their calls so many times; and what a rank says in a comparison.
REPORT = "fsdp_flat/failure/%d"
_GIVEN_UP = "fsdp_flat/given_up/%d"
_SAID = "fsdp_flat/compared/%s/%d"
# For a rank that is about to make a call of some number: that another rank waits in that call.
_WAITS = "fsdp_flat/waits/%d/%d/%d"
# Begins a report because of which another rank has given up.
_MARK = "!"
_refusals: weakref.WeakSet[BaseException] = weakref.WeakSet()


class Pending:
    """Represents asynchronous work. ``wait`` may be called more than once; only the first that returns has an effect.

    If a wait raises, the works are kept until they are complete: they may still write to their tensors.

    Args:
        works: the work; None for work that is complete.
        result: the work's output, which is kept until the work is complete; valid after ``wait``.
        finish: computes the result, once the work is complete.
    """

    __slots__ = ("_finish", "_works", "result")

    def __init__(
        self, works: Iterable[Any], result: torch.Tensor, finish: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._works = tuple(works)
        self._finish = finish
        self.result = result

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        """Block until the result is ready (on an accelerator: until the current stream may use it), and return it."""
        try:
            for work in self._works:
                if work is not None:
                    work.wait()
        except BaseException:
            give_up(self)
            raise
        finish = self._finish
        self._works, self._finish = (), None
        if finish is not None:
            self.result = finish()
        return self.result

    def rank_groups(self) -> list[RankGroup]:
        """Return the groups of the works, as far as these are the library's own."""
        return [work.rank_group for work in self._works if hasattr(work, "rank_group")]

    def blocks_host(self) -> bool:
        """Return whether a wait blocks the host until the works are complete."""
        return any(getattr(work, "blocks_host", False) for work in self._works)

    def is_lost(self) -> bool:
        """Return whether the works can never become complete, because another rank has ended."""
        return any(hasattr(work, "is_lost") and work.is_lost() for work in self._works)


# Each with memory that it does not refer to.
_kept: dict[Pending, list[object]] = {}


def give_up(pending: Pending) -> None:
    """Keep a collective of which this rank has ended the wait, and have ranks compare calls before they go on."""
    keep(pending)
    for rank_group in pending.rank_groups():
        refrain(rank_group)


def keep(pending: Pending, *memory: object) -> None:
    """Keep a collective that nobody waits for any more, and its ``memory``, until its works are complete."""
    _kept.setdefault(pending, []).extend(memory)
    drop_completed()


def refrain(rank_group: RankGroup) -> None:
    """Have this rank compare its calls in a group with those of other ranks before the next one."""
    with suppress(UsageError):  # a group that was destroyed gets no more calls
        if rank_group.group is not None and not is_fake(rank_group.group):
            calls = calls_of(rank_group.group)
            calls.gave_up = calls.has_failed = True
            compare_first(rank_group.group)


def compare_first(group: dist.ProcessGroup) -> None:
    """Have this rank call :func:`go_on` before its next call in a group, which is not kept alive for that."""
    calls = calls_of(group)
    calls.before_next = calls.before_next or partial(go_on, weakref.ref(parent_of(group)))


def drop_completed() -> None:
    """Let go of what was given up and is complete by now."""
    for pending in list(_kept):
        with suppress(Exception):  # of a second part, which a failed first part did not let begin
            if pending.is_completed():
                _kept.pop(pending, None)  # another thread may have dropped it


def settled(pending: Pending) -> bool:
    """Wait some seconds for a collective of a step that this rank aborts; return whether it is complete.

    Other ranks that abort the step at the same point complete it, and so do late ones. If a rank has failed before it
    came there, this rank gives the collective up.
    """
    if not pending.blocks_host():
        with suppress(RuntimeError):
            pending.wait()
            return True
        return False
    groups, pause = pending.rank_groups(), 0.001
    begun = looked = time.monotonic()
    with suppress(Exception):  # the caller raises an error of its own
        while not pending.is_completed():
            now = time.monotonic()
            if now > looked + _LOOK_INTERVAL_S:
                looked = now
                if pending.is_lost() or any(will_not_come(each, each.others) for each in groups):
                    give_up(pending)
                    return False
            if now > begun + _SETTLE_S:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_INTERVAL_S)
        return True
    give_up(pending)
    return False


# -- reports ---------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """Holds the report of a rank's failure.

    Attributes:
        num_failures: number of failures of the rank after as many calls, or :data:`REFUSED`.
        number: number of the calls that it has made before.
        text: what has happened, worded to follow "rank 1".
    """

    num_failures: int
    number: int
    text: str

    @classmethod
    def parsed(cls, report: str) -> Report:
        num_failures, number, text = report.removeprefix(_MARK).split(" ", 2)
        return cls(int(num_failures), int(number), text)

    def is_newer(self, calls: Calls) -> bool:
        """Return whether the rank has failed more often than this rank, whose ``calls`` are given, has gone on.

        Where every rank fails at one point and goes on, the numbers of their failures there are equal.
        """
        return self.num_failures > calls.failures_after(self.number) - bool(calls.report)


def will_not_come(rank_group: RankGroup, ranks: Collection[int], *, gives_up: bool = True) -> bool:
    """Return whether this rank has to give up to wait for ``ranks``: a collective was given up, or one has failed.

    The report of the rank that has failed is marked then, so that it compares its calls before it goes on. A rank that
    is about to make the call in which this rank waits is told so. Without ``gives_up`` reports do not count.
    """
    group = parent_of(rank_group.process_group)
    calls, found = calls_of(group), False

    def request(store: dist.Store) -> None:
        nonlocal found
        key = _GIVEN_UP % calls.num_comparisons
        found = store.check([key])
        for rank in () if found else ranks:
            said = _read(store, _SAID % (f"{calls.num_comparisons}/calls", rank))
            if said and _makes(json.loads(said), calls):
                store.set(_WAITS % (rank, json.loads(said)[0] + 1, rank_group.rank), "here")
                continue
            report = _read(store, REPORT % rank)
            # What a rank has begun before it failed comes, however long that takes.
            if not gives_up or not report or Report.parsed(report).number >= calls.number:
                continue
            if Report.parsed(report).is_newer(calls):
                marked = report if report.startswith(_MARK) else _MARK + report
                if report == marked or store.compare_set(REPORT % rank, report, marked).decode() == marked:
                    found = True
                    store.set(key, str(rank_group.rank))
                    return

    ask_store(group, request)
    return found


def _makes(row: list[Any], calls: Calls) -> bool:
    """Return whether the next call of a rank that compares calls, in what it says, is this rank's of that number."""
    number, _, call, *_ = row
    return any([unit, operation] == call for each, unit, operation in list(calls.last) if each == number + 1)


def is_refusal(error: BaseException) -> bool:
    """Return whether an error says that a group is refused, so that this rank will send nothing in its other groups."""
    return any(each is error for each in _refusals)  # a caller's error may not be hashable


# -- going on --------------------------------------------------------------------------------------------------------


def go_on(group_of: weakref.ref[dist.ProcessGroup], operation: str, unit: int) -> None:
    """Withdraw this rank's report before its next call in a group, once no other rank takes that for another call.

    Raises:
        RankMismatchError: ranks have made different calls. Every rank of the group raises it.
        PeerFailureError: a rank has ended, or has not come to the comparison within the group's timeout.
    """
    group = group_of()
    assert group is not None, "a call in the group is under way"
    calls, rank_group = calls_of(group), RankGroup(group, group.rank(), group.size())
    if calls.gave_up or calls.left_out or not _withdrawn(rank_group, calls):
        _compare(rank_group, calls, [unit, operation])
    calls.report, calls.left_out, calls.before_next = "", False, None


def _withdrawn(rank_group: RankGroup, calls: Calls) -> bool:
    """Withdraw this rank's report, and return True, unless a collective of the group was given up."""
    is_free = True

    def request(store: dist.Store) -> None:
        nonlocal is_free
        is_free = not store.check([_GIVEN_UP % calls.num_comparisons])
        if is_free and calls.report:
            left = store.compare_set(REPORT % rank_group.rank, calls.report, "").decode(errors="replace")
            is_free = not left.startswith(_MARK)

    ask_store(rank_group.process_group, request)
    return is_free


def _compare(rank_group: RankGroup, calls: Calls, call: list[Any]) -> None:
    """Return once all other ranks have come here with the same calls, which are complete, or wait in this very call.

    Args:
        rank_group, calls: the group, and this rank's calls there.
        call: unit and operation of this rank's next call.
    """
    group, index = rank_group.process_group, calls.num_comparisons
    digest = hashlib.blake2b(repr([*calls.last, call]).encode(), digest_size=8).hexdigest()
    own = [calls.number, digest, call, calls.failures_after(calls.number), calls.error]
    rows = _exchange(rank_group, calls, f"{index}/calls", own, number=calls.number + 1)
    if rows is None:
        if not _withdrawn(rank_group, calls):
            _compare(rank_group, calls, call)
            return
        calls.has_failed = False
        ask_store(group, lambda store: store.set(_SAID % (f"{index}/calls", rank_group.rank), ""))
        return
    if len({(number, digest) for number, digest, *_ in rows}) > 1:
        numbers = ", ".join(f"rank {rank} {number}" for rank, (number, *_) in enumerate(rows))
        reason = f"its ranks have made different calls there ({numbers})"
    else:
        # A call that raised before it sent anything is among the calls too.
        until = time.monotonic() + min(_COMPLETE_S, timeout_of(group).total_seconds())
        while is_missing := any(
            each.group and parent_of(each.group) is group for pending in list(_kept) for each in pending.rank_groups()
        ):
            if time.monotonic() > until:
                break
            time.sleep(_POLL_INTERVAL_S / 10)
            drop_completed()
        flags = _exchange(rank_group, calls, f"{index}/missing", [is_missing])
        assert flags is not None
        missing = [rank for rank, (flag,) in enumerate(flags) if flag]
        reason = f"it has not ended on rank(s) {missing}, though all have made the same calls" if missing else ""
    if reason:
        _refuse(
            calls,
            f"A collective of the group was given up, and {reason}: the next one of rank {rank_group.rank} would get "
            f"what another rank has sent for another unit. {_first(dict(enumerate(rows)))}{_ADVICE}",
        )
    calls.compared(max(num_failures for _, _, _, num_failures, _ in rows))

    def clean(store: dist.Store) -> None:
        # Not deleted: another rank may be about to read it.
        store.set(REPORT % rank_group.rank, "")
        if index:
            # Every rank has come here, so all have left the comparison before.
            store.delete_key(_GIVEN_UP % (index - 1))
            for what in ("calls", "missing"):
                store.delete_key(_SAID % (f"{index - 1}/{what}", rank_group.rank))

    ask_store(group, clean)


def _exchange(
    rank_group: RankGroup, calls: Calls, name: str, own: list[Any], *, number: int | None = None
) -> list[list[Any]] | None:
    """Return what each rank says under a name, through the store; raise once one has ended, or will not come.

    If no collective was given up, ranks may wait in call ``number`` of the group instead: then return None.
    """
    group, size = rank_group.process_group, rank_group.size
    limit = timeout_of(group).total_seconds()
    rows: dict[int, list[Any]] = {}
    refused: dict[int, str] = {}
    waiting: set[int] = set()

    def exchange(store: dist.Store) -> None:
        if calls.gave_up:
            store.set(_GIVEN_UP % calls.num_comparisons, str(rank_group.rank))
        elif store.check([_GIVEN_UP % calls.num_comparisons]):
            calls.gave_up = True
        waiting.clear()
        store.set(_SAID % (name, rank_group.rank), json.dumps(own))
        for rank in range(size):
            if rank not in rows and (said := _read(store, _SAID % (name, rank))):
                rows[rank] = json.loads(said)
            if rank in rows:
                continue
            if not calls.gave_up and number and store.check([_WAITS % (rank_group.rank, number, rank)]):
                waiting.add(rank)
            elif (report := _read(store, REPORT % rank)) and Report.parsed(report).num_failures == REFUSED:
                refused[rank] = Report.parsed(report).text

    begun, is_logged = time.monotonic(), False
    while True:
        ask_store(group, exchange)
        waited, missing = time.monotonic() - begun, [rank for rank in range(size) if rank not in rows]
        if not missing:
            return [rows[rank] for rank in range(size)]
        same = all(row[:2] == own[:2] for row in rows.values())
        if same and waiting.issuperset(missing):
            return None
        reason = "; ".join(f"rank {rank} {text}" for rank, text in refused.items())
        if waited > limit:
            reason = f"rank(s) {missing} have not come to that within {limit:.0f} seconds"
        elif waited > _LOOK_INTERVAL_S and (ended := set(missing).intersection(ended_ranks(rank_group))):
            reason = f"rank(s) {sorted(ended)} have ended or closed their connections"
        if reason:
            raise PeerFailureError(
                f"After an error rank {rank_group.rank} of the group compares its number of calls with those of the "
                f"other ranks before its next one, and {reason}. {_first(rows)}{_ADVICE}"
            )
        if waited > WARN_AFTER_S and not is_logged:
            is_logged = True
            text = "rank %d of the group has waited %.0f s for rank(s) %s to compare numbers of calls, since it %s"
            _logger.warning(text, rank_group.rank, WARN_AFTER_S, missing, calls.error)
        time.sleep(min(max(waited / 20, 0.001), _POLL_INTERVAL_S))


def _read(store: dist.Store, key: str) -> str:
    """Return the text of a key; it is empty if there is none."""
    return store.get(key).decode(errors="replace") if store.check([key]) else ""


# In the report of a rank whose group is refused: it sends nothing in its other groups either.
REFUSED = 1 << 62
_ADVICE = (
    "Collectives of the group are refused. End all ranks, or let the launcher start them again, from the last "
    "checkpoint. To skip a batch that fails on some ranks, let all ranks exchange that before the forward."
)


def _first(rows: dict[int, list[Any]]) -> str:
    """Return a sentence with the error of a rank that failed by itself, or of the first rank if none did."""
    texts = [(rank, row[-1]) for rank, row in sorted(rows.items()) if isinstance(row[-1], str) and row[-1]]
    own = [each for each in texts if not each[1].startswith(("was in ", "raised PeerFailureError"))]
    return "".join(f"First error: rank {rank} {text}. " for rank, text in (own or texts)[:1])


def _refuse(calls: Calls, text: str) -> None:
    """Raise now, and at each further call."""

    def refuse(*_: object) -> None:
        error = RankMismatchError(text)
        _refusals.add(error)
        raise error

    calls.before_next = refuse
    refuse()
