"""Keeps the memory of collectives that were given up, and has ranks compare their calls before they go on.

A rank that raises reports it in the store of each of its groups, and a rank that waits for it gives up (``failures``).
Neither gloo nor another backend can take a collective back: it goes on to write to its output and to send its input,
and takes the next collective of the rank that raised for the missing one. So two rules hold, for every backend:

* What is given up stays referenced here until its works are complete, with its memory.
* A rank that has given up a collective of a group, or that another one has given up to wait for, compares its number of
  calls in the group (``calls``) with those of all other ranks before its next one. If they are equal, each collective
  has found its counterparts, and ranks go on. Else the group is refused on every rank from then on.

A rank that has raised and that no rank has given up to wait for goes on at once, as in a program that skips a batch.
The store decides which of the two comes first: a rank withdraws its own report, or another one marks it, not both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from fsdp_flat.comm.calls import Calls, calls_of
from fsdp_flat.comm.rank_groups import RankGroup, ended_ranks, is_fake, parent_of
from fsdp_flat.comm.torch_comm import ask_store, timeout_of
from fsdp_flat.errors import PeerFailureError, RankMismatchError

_logger = logging.getLogger("fsdp_flat")
WARN_AFTER_S = 10.0
_LOOK_INTERVAL_S = 1.0
_POLL_INTERVAL_S = 0.1
# Time for works to end once all ranks have begun them.
_COMPLETE_S = 60.0
# Keys in the store of a group: a rank's report of its failure; that a collective was given up since ranks have compared
# their calls so many times; and what a rank says in a comparison.
REPORT = "fsdp_flat/failure/%d"
_GIVEN_UP = "fsdp_flat/given_up/%d"
_SAID = "fsdp_flat/compared/%s/%d"
# Begins a report because of which another rank has given up.
_MARK = "!"
_refusals: weakref.WeakSet[BaseException] = weakref.WeakSet()


class Abandoned(Protocol):
    """Describes a collective (``Pending``) that may be given up."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...

    # The groups of its works; and whether a wait for them blocks the host until they are complete.
    def rank_groups(self) -> list[RankGroup]: ...

    def blocks_host(self) -> bool: ...

    # Whether it can never become complete.
    def is_lost(self) -> bool: ...


# Each with memory that it does not refer to.
_kept: dict[Abandoned, list[object]] = {}


def give_up(pending: Abandoned, *memory: object) -> None:
    """Keep a collective that nobody waits for any more, and its ``memory``, until its works are complete."""
    drop_completed()
    if not pending.is_completed():
        _kept.setdefault(pending, []).extend(memory)
    for rank_group in pending.rank_groups():
        refrain(rank_group)


def refrain(rank_group: RankGroup) -> None:
    """Have this rank compare its calls in a group with those of other ranks before the next one."""
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
    for pending in [pending for pending in list(_kept) if pending.is_completed()]:
        del _kept[pending]


def settled(pending: Abandoned) -> bool:
    """Wait for a collective of a step that this rank aborts; return False if other ranks will not complete it.

    Other ranks that abort the step at the same point, or are late, complete it.
    """
    if not pending.blocks_host():
        with suppress(RuntimeError):
            pending.wait()
            return True
        return False
    groups = pending.rank_groups()
    begun = looked = time.monotonic()
    until = begun + min(timeout_of(each.group).total_seconds() for each in groups if each.group is not None)
    pause = 0.001
    with suppress(RuntimeError, OSError):
        while not pending.is_completed():
            now = time.monotonic()
            if now > until or pending.is_lost():
                return False
            if now > looked + _LOOK_INTERVAL_S:
                looked = now
                if any(will_not_come(each, each.others) for each in groups):
                    return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_INTERVAL_S)
        return True
    return False


# -- reports ---------------------------------------------------------------------------------------------------------


def report_number(report: str) -> int:
    """Return the number of failures that a report gives."""
    return int(report.removeprefix(_MARK).partition(" ")[0])


def report_text(report: str) -> str:
    """Return the text of a report."""
    return report.partition(" ")[2]


def counts(number: int, calls: Calls) -> bool:
    """Return whether a rank that has failed so often will send nothing to this rank.

    Where every rank fails and goes on, their numbers are equal. While this rank has yet to go on after its failure,
    one of the same number will send nothing either.
    """
    return number > calls.num_failures - bool(calls.report)


def will_not_come(rank_group: RankGroup, ranks: Collection[int]) -> bool:
    """Return whether this rank has to give up to wait for ``ranks``: one has failed, or a collective was given up.

    The report of the rank that has failed is marked then, so that it compares its calls before it goes on.
    """
    assert rank_group.group is not None
    group = parent_of(rank_group.group)
    calls, found = calls_of(group), False

    def request(store: dist.Store) -> None:
        nonlocal found
        key = _GIVEN_UP % calls.num_comparisons
        found = store.check([key])
        for rank in () if found else ranks:
            report = store.get(REPORT % rank).decode(errors="replace") if store.check([REPORT % rank]) else ""
            if report and counts(report_number(report), calls):
                marked = report if report.startswith(_MARK) else _MARK + report
                if report == marked or store.compare_set(REPORT % rank, report, marked).decode() == marked:
                    found = True
                    store.set(key, str(rank_group.rank))
                    return

    _ask(group, request)
    return found


def is_refusal(error: BaseException) -> bool:
    """Return whether an error says that a group is refused, so that this rank will send nothing in its other groups."""
    return any(each is error for each in _refusals)  # a caller's error may not be hashable


# -- going on --------------------------------------------------------------------------------------------------------


def go_on(group_of: weakref.ref[dist.ProcessGroup]) -> None:
    """Withdraw this rank's report before its next call in a group; first compare calls if one was given up there.

    Raises:
        RankMismatchError: ranks have made different calls. Every rank of the group raises it.
        PeerFailureError: a rank has ended, or has not come to the comparison within the group's timeout.
    """
    group = group_of()
    assert group is not None, "a call in the group is under way"
    calls, rank_group = calls_of(group), RankGroup(group, group.rank(), group.size())
    if calls.gave_up or not _withdrawn(group, rank_group.rank, calls):
        _compare(rank_group, calls, group)
    calls.report, calls.before_next = "", None


def _withdrawn(group: dist.ProcessGroup, rank: int, calls: Calls) -> bool:
    """Withdraw this rank's report, and return True, unless a collective of the group was given up."""
    is_free = True

    def request(store: dist.Store) -> None:
        nonlocal is_free
        is_free = not store.check([_GIVEN_UP % calls.num_comparisons])
        if is_free and calls.report:
            left = store.compare_set(REPORT % rank, calls.report, "").decode(errors="replace")
            is_free = not left.startswith(_MARK)

    _ask(group, request)
    return is_free


def _compare(rank_group: RankGroup, calls: Calls, group: dist.ProcessGroup) -> None:
    """Wait for the other ranks to come here too; return if all have made the same calls, and these are complete."""
    index = calls.num_comparisons
    digest = hashlib.blake2b(repr(list(calls.last)).encode(), digest_size=8).hexdigest()
    rows = _exchange(rank_group, calls, f"{index}/calls", [calls.number, digest, calls.num_failures, calls.error])
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
        missing = [rank for rank, (flag,) in enumerate(flags) if flag]
        reason = f"it has not ended on rank(s) {missing}, though all have made the same calls" if missing else ""
    if reason:
        _refuse(
            calls,
            f"A collective of the group was given up, and {reason}: the next one of rank {rank_group.rank} would get "
            f"what another rank has sent for another unit. {_first(dict(enumerate(rows)))}{_ADVICE}",
        )
    calls.compared(max(num_failures for _, _, num_failures, _ in rows))

    def clean(store: dist.Store) -> None:
        store.delete_key(REPORT % rank_group.rank)
        if index:
            # Every rank has come here, so all have left the comparison before.
            store.delete_key(_GIVEN_UP % (index - 1))
            for what in ("calls", "missing"):
                store.delete_key(_SAID % (f"{index - 1}/{what}", rank_group.rank))

    _ask(group, clean)


def _exchange(rank_group: RankGroup, calls: Calls, name: str, own: list[Any]) -> list[list[Any]]:
    """Return what each rank says under a name, through the store; raise once one has ended, or will not come."""
    group, size = rank_group.group, rank_group.size
    assert group is not None
    limit = timeout_of(group).total_seconds()
    rows: dict[int, list[Any]] = {}
    refused: dict[int, str] = {}

    def exchange(store: dist.Store) -> None:
        store.set(_GIVEN_UP % calls.num_comparisons, str(rank_group.rank))
        store.set(_SAID % (name, rank_group.rank), json.dumps(own))
        for rank in range(size):
            if rank not in rows and store.check([_SAID % (name, rank)]):
                rows[rank] = json.loads(store.get(_SAID % (name, rank)))
            elif rank not in rows and store.check([REPORT % rank]):
                report = store.get(REPORT % rank).decode(errors="replace")
                if report and report_number(report) == REFUSED:
                    refused[rank] = report_text(report)

    begun, is_logged = time.monotonic(), False
    while True:
        _ask(parent_of(group), exchange)
        waited, missing = time.monotonic() - begun, [rank for rank in range(size) if rank not in rows]
        if not missing:
            return [rows[rank] for rank in range(size)]
        reason = "; ".join(f"rank {rank} {text}" for rank, text in refused.items())
        if waited > limit:
            reason = f"rank(s) {missing} have not come to that within {limit:.0f} seconds"
        elif waited > _LOOK_INTERVAL_S and (ended := set(missing).intersection(ended_ranks(rank_group))):
            reason = f"rank(s) {sorted(ended)} have ended or closed their connections"
        if reason:
            raise PeerFailureError(
                f"A collective of the group was given up, so rank {rank_group.rank} compares its number of calls with "
                f"those of the other ranks before its next one, and {reason}. {_first(rows)}{_ADVICE}"
            )
        if waited > WARN_AFTER_S and not is_logged:
            is_logged = True
            text = "rank %d of the group has waited %.0f s for rank(s) %s to compare numbers of calls, since it %s"
            _logger.warning(text, rank_group.rank, WARN_AFTER_S, missing, calls.error)
        time.sleep(min(max(waited / 20, 0.001), _POLL_INTERVAL_S))


def _ask(group: dist.ProcessGroup, request: Callable[[dist.Store], object]) -> None:
    with suppress(Exception):  # the group may be gone
        ask_store(group, request)


# The number in the report of a rank whose group is refused: it sends nothing in its other groups either.
REFUSED = 1 << 62
_ADVICE = (
    "Collectives of the group are refused. End all ranks, or let the launcher start them again, from the last "
    "checkpoint. To skip a batch that fails on some ranks, let all ranks exchange that before the forward."
)


def _first(rows: dict[int, list[Any]]) -> str:
    """Return a sentence with the error of a rank that failed by itself, or of the first rank if none did."""
    texts = [(rank, row[-1]) for rank, row in sorted(rows.items()) if isinstance(row[-1], str) and row[-1]]
    own = [each for each in texts if each[1].startswith("raised ") and "PeerFailureError" not in each[1][:40]]
    return "".join(f"First error: rank {rank} {text}. " for rank, text in (own or texts)[:1])


def _refuse(calls: Calls, text: str) -> None:
    """Raise now, and at each further call."""

    def refuse() -> None:
        error = RankMismatchError(text)
        _refusals.add(error)
        raise error

    calls.before_next = refuse
    refuse()
