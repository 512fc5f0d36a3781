"""Makes ranks agree, or fail together with the text of the first rank that failed or differs.

Ranks compare a digest of their payload; only if some differ they exchange the payloads themselves. A result found over
one group is part of the payload for the next one, so that ranks that are only in that group get it too. A barrier
detects a collective that was called on one rank only, before any data is sent.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch

from fsdp_flat.comm import failures
from fsdp_flat.comm.calls import Progress, StallDetector, calls_of
from fsdp_flat.comm.exchanges import decoded, encoded, exchange_bytes, exchange_ints
from fsdp_flat.comm.failures import has_failed, report_failure, reports_of_others
from fsdp_flat.comm.given_up import will_not_come
from fsdp_flat.comm.rank_groups import RankGroup, ShardingGroups, connected
from fsdp_flat.comm.routes import absences
from fsdp_flat.comm.torch_comm import group_store, timeout_of
from fsdp_flat.errors import PeerFailureError, RankMismatchError, UsageError, some_of
from fsdp_flat.user_warnings import warn_user

WARN_AFTER_S = 20.0
POLL_INTERVAL_S = 1.0
_SHORTEST_POLL_S = 0.001
# Words of 8 bytes in a row of which a fingerprint sums the columns.
_COLUMNS = 512
# Bytes up to which tensors are copied to the host together and hashed there.
_SMALL_NBYTES = 16384
_MOST_ENTRIES = 1 << 16
_CODES = {"all-gather": 1, "reduction": 2}
# Keys, in the store of a group, for the rank that is leaving a barrier, and for the barrier that another rank has left.
_LEAVING = "fsdp_flat/leaving"
_LEFT = "fsdp_flat/left/%d"
# Key, in the store of a group, for a digest of what the first rank has said that has come to a barrier; and what is
# added to the barrier's count for a rank that says something else, and for one that has failed.
_SAID = "fsdp_flat/said/%d"
# Key, in the store of a group, for the number of operations that a rank has entered.
_ENTERED = "fsdp_flat/entered/%d"
_DISSENT = 1 << 32
_FAILURE = 1 << 48

# -- digests ---------------------------------------------------------------------------------------------------------


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def digest_of(data: bytes) -> int:
    """Return a hash of ``data`` as a signed 64-bit integer, to be exchanged in its place."""
    return int.from_bytes(_digest(data), "big", signed=True)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a 64-bit hash of every element's bits and place: column and row sums, hashed on the host.

    Sums are of 64-bit words, 512 to a row, on the tensor's device. Column sums alone would not see the order of rows.
    """
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    # Sum 64-bit words: torch widens shorter ones before it adds, which takes many times as long.
    row = 8 * _COLUMNS
    whole = data.numel() // row * row
    rows = data[:whole].view(torch.int64).view(-1, _COLUMNS)
    parts = (rows.sum(0), rows.sum(1), data[whole:])
    bits = [part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
    return digest_of(b"".join(bits))


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 64-bit hash of every element's bits for each tensor.

    All small ones of a dtype and a device are copied to the host together.
    """
    found = [0] * len(tensors)
    small: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.nbytes <= _SMALL_NBYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append((index, tensor))
        else:
            found[index] = fingerprint(tensor)
    for entries in small.values():
        flat = torch.cat([tensor.reshape(-1) for _, tensor in entries])
        host = flat.view(torch.uint8).cpu().numpy().tobytes()
        stop = 0
        for index, tensor in entries:
            start, stop = stop, stop + tensor.nbytes
            found[index] = digest_of(host[start:stop])
    return found


class CollectiveLog:
    """Records the collectives issued since the last comparison between ranks, by sharding groups.

    An all-gather of one unit that is paired with another unit's of the same size succeeds and mixes their weights. Only
    the shared-memory transport detects that itself, so ranks compare their logs before an optimizer steps. Ranks of a
    shard group compare all collectives, and replicas compare reductions: a replica may evaluate by itself.
    """

    def __init__(self) -> None:
        # Operation, and a unit with its ``unit_id`` and ``name``.
        self._issued: dict[ShardingGroups, list[tuple[str, Any]]] = {}

    def of(self, groups: ShardingGroups) -> list[tuple[str, Any]]:
        """Return the list to which callers append ``(operation, unit)`` for each collective over ``groups``."""
        return self._issued.setdefault(groups, [])

    def digests(self, groups: ShardingGroups) -> tuple[bytes, bytes]:
        """Return 8-byte digests of all collectives over ``groups``, and of the reductions among them."""
        issued = [part for operation, unit in self.of(groups) for part in (_CODES[operation], unit.unit_id)]
        reductions = [unit.unit_id for operation, unit in self.of(groups) if operation == "reduction"]
        return _digest(array("q", issued).tobytes()), _digest(array("q", reductions).tobytes())

    def lines(self, groups: ShardingGroups, rank_group: RankGroup) -> list[str]:
        """Return one readable line for each collective that ranks of ``rank_group`` compare."""
        return [
            f"the {operation} of unit {unit.name!r}"
            for operation, unit in self.of(groups)
            if rank_group is groups.shard or operation == "reduction"
        ]

    def trim(self) -> None:
        """Clear logs that are too long: programs that only evaluate never compare them."""
        for issued in self._issued.values():
            if len(issued) > _MOST_ENTRIES:
                issued.clear()

    def clear(self) -> None:
        """Clear all logs, after a comparison between ranks or an aborted step."""
        for issued in self._issued.values():
            issued.clear()


# -- consensus -------------------------------------------------------------------------------------------------------


def exchange_if_different(
    payload: bytes,
    rank_group: RankGroup,
    *,
    compared: bytes | None = None,
    doing: str = "",
) -> list[bytes] | None:
    """Return the payloads of all ranks, in rank order, or None if they (or ``compared``, if given) are equal.

    Every rank of the group must call this. If payloads are equal, one integer is exchanged. Errors say what ranks were
    ``doing``.
    """
    if not connected([rank_group]):
        return None
    digest = digest_of(payload if compared is None else compared)
    rows = exchange_ints([digest], rank_group, doing)
    return None if rows == [[digest]] * len(rows) else exchange_bytes(payload, rank_group, doing)


@dataclass(frozen=True, slots=True)
class ErrorTexts:
    """Holds the phrases that errors of :func:`agree` contain."""

    doing: str  # the operation in which a rank failed, a participle
    differ: str = ""  # the statement that ranks differ, a sentence
    advice: str = ""  # the recommended action, a sentence


Lines = Sequence[str] | Callable[[RankGroup], Sequence[str]]


def agree(
    lines: Lines,
    error: Exception | None,
    rank_groups: Sequence[RankGroup],
    texts: ErrorTexts,
) -> None:
    """Raise on every rank if any rank failed or is about to do something different.

    Every rank of the groups must call this, with a description of the next operation, one fact a line, that is the same
    on every rank; after a tab a line may have a text for errors, which may differ. A function returns the lines of each
    group. A rank that failed passes its exception, which it raises itself.

    Raises:
        PeerFailureError: another rank failed.
        RankMismatchError: lines differ; the text shows the first difference.
    """
    found = find_disagreement(lines, error, rank_groups, texts)
    if found is not None:
        raise found


def find_disagreement(
    lines: Lines,
    error: Exception | None,
    rank_groups: Sequence[RankGroup],
    texts: ErrorTexts,
) -> Exception | None:
    """Return the exception that :func:`agree` would raise, or None.

    A caller that compares other lines over each of several groups passes the result as the next ``error``.
    """
    groups, found = connected(rank_groups), error
    # A difference that ranks of one group have is told to the groups that share ranks with it in a second round.
    linked: list[RankGroup] = []
    is_linked = callable(lines) and len(groups) > 1
    for rank_group in chain(groups, linked):
        if found is None:
            sent = ["", *(lines(rank_group) if callable(lines) else lines)]
        elif found is error:
            sent = [
                PeerFailureError.__name__,
                f"Rank {rank_group.rank} of the group failed while {texts.doing}, so this rank stops too: "
                f"{type(found).__name__}: {found}",
            ]
        else:
            sent = [type(found).__name__, str(found)]
        payload = "\n".join([str(is_linked), *sent])
        compared = "\n".join(map(_compared, payload.split("\n")))
        payloads = exchange_if_different(encoded(payload), rank_group, compared=encoded(compared), doing=texts.doing)
        by_rank = [decoded(each).split("\n") for each in payloads or [encoded(payload)]]
        if rank_group not in linked and any(flag == str(True) for flag, *_ in by_rank):
            linked.append(rank_group)
        if found is None:
            found = _first_error([received for _, *received in by_rank], texts)
    return found


def _compared(line: str) -> str:
    return line.partition("\t")[0]


def _first_error(by_rank: list[list[str]], texts: ErrorTexts) -> Exception | None:
    """Return the error of the first rank that has one, else of the first line in which ranks differ from rank 0."""
    for kind, *lines in by_rank:
        if kind:
            return {each.__name__: each for each in (PeerFailureError, RankMismatchError)}[kind]("\n".join(lines))
    for first, *others in zip_longest(*by_rank, fillvalue="nothing more"):
        shown = first.rpartition("\t")[2]
        differing = {rank: line for rank, line in enumerate(others, 1) if _compared(line) != _compared(first)}
        found = [
            f"rank {rank} has {'another ' * (other == shown)}{other}"
            for rank, line in differing.items()
            if (other := line.rpartition("\t")[2])
        ]
        if differing:
            return RankMismatchError(
                f"{texts.differ} First difference: rank 0 of the group has {shown}, {some_of(found, 8)}. {texts.advice}"
            )
    return None


# -- barriers ---------------------------------------------------------------------------------------------------------


def enter(rank_group: RankGroup) -> None:
    """Note that this rank is in the caller's operation, and will come to its barrier, perhaps after long work.

    Every rank of the group must call this, and then :func:`barrier` with ``is_entered``.
    """
    if connected([rank_group]):
        group_store(rank_group.process_group).add(_ENTERED % rank_group.rank, 1)


class UntilRanksMeet:
    """Holds the first exception of blocks that a rank runs before it meets others, where all ranks raise it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


def meet(
    what: str,
    rank_groups: Sequence[RankGroup],
    error: Exception | None,
    texts: ErrorTexts,
    *,
    lines: Sequence[str] = (),
    said: str = "",
) -> list[bool]:
    """Wait for the ranks of all groups, and return for each whether all of its ranks have ``said`` the same.

    Raises on every rank if any passes an ``error``, which it raises itself, or other ``lines``, as in :func:`agree`.
    Otherwise as :func:`barrier`.
    """
    told = json.dumps([said, *lines])
    met = [bool(barrier(what, rank_group, told, error=error)) for rank_group in rank_groups]
    if error is not None or not all(met) or len(connected(rank_groups)) > 1:
        agree(lines, error, rank_groups, texts)
    return met


def barrier(
    what: str, rank_group: RankGroup, said: str = "", *, is_entered: bool = False, error: Exception | None = None
) -> bool | None:
    """Wait for all ranks of a group through its store, without a collective; return whether all have ``said`` the same.

    Errors name the caller's operation. Every rank of the group must call this, also one that has failed in the
    operation before: it passes its ``error``, and the result is None on all ranks. Each rank sends two requests to the
    store, a third one if it says something, and one or two whenever it looks again. After a barrier that ranks have
    given up, the result may be False of ranks that have said the same.

    Work of a single rank (evaluating, writing files) is mostly done on rank 0, so other ranks may wait for it for
    minutes; they only warn. If rank 0 waits for 20 seconds and no other rank arrives, the call is assumed to be on
    rank 0 only. Ranks that have entered (``is_entered``) are waited for without a warning. A rank that has ended is
    detected within seconds, and one that sends a different collective within a second by the ranks that share memory
    with it. The first rank that gives up tells those that wait with it, so that they name the rank that it has named,
    and not it.

    Raises:
        UsageError: if this is rank 0 and no other rank has arrived, if another rank sends a different collective, or
            if a rank has not arrived within the group's timeout.
        PeerFailureError: if a rank has ended that has not arrived.
        Exception: ``error``, in the place of these.
    """
    if not connected([rank_group]):
        return True if error is None else None
    group = rank_group.process_group
    calls = calls_of(group)
    calls.add(f"the barrier of {what}")
    store_barrier = _StoreBarrier(rank_group, said, has_failed=error is not None)
    if store_barrier.is_complete:
        return store_barrier.is_unanimous
    limit = timeout_of(group).total_seconds()
    patience, detector = min(WARN_AFTER_S, limit), StallDetector(rank_group)
    begun = time.monotonic()
    warned = False
    waited = 0.0
    while not store_barrier.poll(min(max(waited / 20, _SHORTEST_POLL_S), POLL_INTERVAL_S)):
        waited = time.monotonic() - begun
        is_long = waited > POLL_INTERVAL_S
        kind: type[Exception] = UsageError
        reason, follows, is_alone = "", False, False
        if is_long and store_barrier.was_left():
            kind, reason, follows = PeerFailureError, "another rank has given up to wait for all", True
        elif absent := absences(rank_group, asks_gloo=is_long):
            for rank in store_barrier.missing():
                if rank in absent and (not reason or follows):
                    kind, sign = absent[rank]
                    reason = f"rank {rank} has not called it but {sign}"
                    follows = kind is PeerFailureError and has_failed(rank_group, [rank])
        if is_long and not reason and will_not_come(rank_group, rank_group.others, gives_up=False):
            kind, reason, follows = PeerFailureError, "a collective of the group was given up", True
        difference = detector.difference() if waited > failures.LOOK_AFTER_S and not reason else None
        if difference is not None:
            reason = f"another rank is in another collective; this rank is {Progress.place}"
        if not reason and waited >= patience and (waited >= limit or rank_group.rank == 0 or not warned):
            missing = store_barrier.missing()
            strangers = store_barrier.not_entered() if is_entered else missing
            is_alone = len(strangers) == rank_group.size - 1
            if waited >= limit or (is_alone and rank_group.rank == 0):
                reason = f"rank(s) {missing} have not called it within {waited:.0f} seconds"
            elif not warned and strangers:
                warned = True
                warn_user(
                    f"{what} on rank {rank_group.rank} of the group has waited {waited:.0f} seconds for rank(s) "
                    f"{strangers}; every rank must call it."
                )
        if reason and store_barrier.leave():
            calls.withdraw()
            if is_entered:
                group_store(group).add(_ENTERED % rank_group.rank, -1)
            if not is_alone:
                report_failure(rank_group, f"was in {what}, and {reason}")
            told = f" Of the others: {reports_of_others(rank_group)}." if follows else ""
            if error is not None:
                raise error
            raise difference or kind(
                f"{what} was called on rank {rank_group.rank} of the group, and {reason}.{told} It is a collective: "
                "every rank of the group must call it, at the same point, also one that does not use the result "
                "(rank0_only=True leaves its result empty). If the output of another rank has an error, that came "
                "first. If ranks are only late, call torch.distributed.barrier() before it."
            )
    return store_barrier.is_unanimous


class _StoreBarrier:
    """Implements the n-th barrier of a group, where n counts this rank's arrivals.

    Each rank increments its counter and the barrier's in the store. The first to arrive leaves a digest of what it has
    said; the barrier's counter has two more, in its upper bits, of the ranks that have said something else and of those
    that have failed.
    """

    def __init__(self, rank_group: RankGroup, said: str = "", *, has_failed: bool = False) -> None:
        self._store = store = group_store(rank_group.process_group)
        self._rank_group = rank_group
        self._arrived = f"fsdp_flat/arrived/{rank_group.rank}"
        self._index = index = store.add(self._arrived, 1)
        self._counts = f"fsdp_flat/barrier/{index}"
        self._arrival, digest = 1 + has_failed * _FAILURE, _digest(said.encode()).hex()
        if said and not has_failed and store.compare_set(_SAID % index, "", digest) != digest.encode():
            self._arrival += _DISSENT
        self._count(self._arrival)
        if self.is_complete:
            # All ranks have arrived here, so all have left the previous barrier.
            store.delete_key(f"fsdp_flat/barrier/{index - 1}")
            store.delete_key(_SAID % (index - 1))

    def _count(self, added: int) -> int:
        """Add to the barrier's counters; return the number of ranks that have arrived."""
        count = self._store.add(self._counts, added)
        num_arrived = count % _DISSENT
        self.is_complete = num_arrived >= self._rank_group.size
        self.is_unanimous = None if count >= _FAILURE else count < _DISSENT
        return num_arrived

    def poll(self, seconds: float) -> bool:
        """Sleep, and return whether all ranks have arrived; torch would print warnings for a wait that times out."""
        time.sleep(seconds)
        self._count(0)
        return self.is_complete

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived."""
        ranks = range(self._rank_group.size)
        return [rank for rank in ranks if self._store.add(f"fsdp_flat/arrived/{rank}", 0) < self._index]

    def not_entered(self) -> list[int]:
        """Return the ranks that have not entered the operation that this rank is in."""
        own = self._store.add(_ENTERED % self._rank_group.rank, 0)
        return [rank for rank in self._rank_group.others if self._store.add(_ENTERED % rank, 0) < own]

    def was_left(self) -> bool:
        """Return whether a rank has left this barrier since this rank arrived there."""
        key = _LEFT % self._rank_group.rank
        return self._store.check([key]) and int(self._store.get(key)) == self._index

    def leave(self) -> bool:
        """Withdraw this rank's arrival, and return True; return False if all ranks have arrived, or another leaves now.

        The ranks that have arrived are told. One rank leaves at a time: of two whose arrivals are both withdrawn for a
        moment, only one could see from the count that all ranks had arrived.
        """
        own = b"%d" % self._rank_group.rank
        if self._store.compare_set(_LEAVING, "", own.decode()) != own:
            return False
        has_left = self._count(-self._arrival) < self._rank_group.size - 1
        if has_left:
            self._store.add(self._arrived, -1)
            missing = self.missing()
            for rank in self._rank_group.others:
                if rank not in missing:
                    self._store.set(_LEFT % rank, str(self._index))
            self._store.delete_key(_LEFT % self._rank_group.rank)
        else:
            self._count(self._arrival)
        self._store.delete_key(_LEAVING)
        return has_left
