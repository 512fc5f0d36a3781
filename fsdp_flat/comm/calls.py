"""Finds two ranks that wait for each other in different collectives of a group, long before the group's timeout.

Ranks of a group make the same calls in the same order. Each rank keeps the last calls of a group, by number; that is
all that a step does for it. A group of NCCL has its calls in common with its host group, on which ranks wait. A rank
that has waited for seconds shows its calls in the group's store, again at every look, and reads what others show. Where
two ranks made different calls of one number, neither of them can end, which is an error on both.

``torch.distributed.barrier`` is the caller's own, and has no number. A rank that waits in one shows that too. If it has
made fewer calls than a rank that waits in a later one, the second waits for a call that the first cannot make before
the second comes to the barrier. Other calls of ``torch.distributed`` are not known here.

Nothing else is an error: a rank that shows nothing computes or is late, and may come; a rank that shows fewer calls may
make the others. A difference counts once the other rank has shown it twice while this one waits, so it waits too, and
what it shows is not left from an earlier wait. After a failure of this rank, which a caller may catch, its numbers may
differ from those of others, so it shows nothing until ranks have compared their numbers (``given_up``).
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from fsdp_flat.comm.rank_groups import RankGroup, global_ranks, parent_of
from fsdp_flat.comm.torch_comm import ask_store
from fsdp_flat.errors import RankMismatchError, UsageError, counted

# Key, in the store of a group, for what a rank shows.
_KEY = "fsdp_flat/calls/%d"
# More than ranks get apart before each waits for another. Without a number in common, ranks find no difference.
_MOST_CALLS = 64


class Calls:
    """Holds the last calls of this rank in a group: number, id of the unit or 0, and operation.

    Attributes:
        has_failed: this rank has failed since ranks compared their calls.
        thread: the one that uses the group: a barrier in another thread says nothing about when it comes.
        failed_after: number of its calls before its last failure; -1 if it has not failed.
        num_failures: number of its failures after as many calls.
        report: the report of its last failure that is in the store; empty if there is none.
        error: text of its first failure since ranks compared their calls.
        gave_up: it, or a rank that it knows of, has given up a collective since then.
        left_out: by its last failure it has left out calls that other ranks may make.
        num_comparisons: number of times that ranks have compared their calls.
        before_next: called with the next call, after a failure.
    """

    def __init__(self) -> None:
        self.last: deque[tuple[int, int, str]] = deque(maxlen=_MOST_CALLS)
        self.number = 0
        self.has_failed = False
        self.thread = 0
        self.failed_after, self.num_failures, self.num_comparisons = -1, 0, 0
        self.report = self.error = ""
        self.gave_up = self.left_out = False
        self.before_next: Callable[[str, int], None] | None = None

    def add(self, operation: str, unit: int = 0) -> None:
        """Note a call, before it sends anything; raise if the group is refused (``given_up``)."""
        if self.before_next is not None:
            self.before_next(operation, unit)
        self.number += 1
        self.last.append((self.number, unit, operation))

    def withdraw(self) -> None:
        """Forget the last call, which raised, or has sent nothing that other ranks wait for."""
        self.last.pop()
        self.number -= 1

    def failures_after(self, number: int) -> int:
        """Return how often this rank has failed, at the last place where it has, after ``number`` calls."""
        return self.num_failures if self.failed_after == number else 0

    def compared(self, num_failures: int) -> None:
        """Note that all ranks have made the same calls, and have failed at most ``num_failures`` times after them."""
        self.failed_after, self.num_failures = self.number, num_failures
        self.num_comparisons += 1
        self.error, self.gave_up, self.has_failed = "", False, False


BETWEEN, FORWARD, BACKWARD, RECOMPUTED = range(4)
_PHASES = ("between forwards and backwards", "in a forward", "in a backward", "in a recomputed forward")


class Place(NamedTuple):
    """Says where a rank is in training, for error texts.

    Attributes:
        phase: of the tree of units that ran last: ``BETWEEN``, ``FORWARD``, ``BACKWARD`` or ``RECOMPUTED``.
        num_steps: number of steps of optimizers that hold parameters of units.
        num_forwards: number of outermost forwards since the last of these.
        in_no_sync: the last forward or backward was in ``no_sync``; an integer in messages.
    """

    phase: int = BETWEEN
    num_steps: int = 0
    num_forwards: int = 0
    in_no_sync: int = False

    def __str__(self) -> str:
        steps, forwards = counted(self.num_steps, "optimizer steps"), counted(self.num_forwards, "forwards")
        sync = "inside" if self.in_no_sync else "outside"
        return f"{_PHASES[self.phase]}, after {steps} and {forwards} since, {sync} no_sync"


class Progress:
    """Holds the ``place`` of this process in training."""

    place = Place()


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, Calls] = weakref.WeakKeyDictionary()
_unit_names: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]] = weakref.WeakKeyDictionary()


class _State:
    """``has_begun_barriers``: this rank has called ``torch.distributed.barrier(async_op=True)``."""

    has_begun_barriers = False


# What this rank is doing, for error texts: the innermost of the caller's operations, such as "summon_full_params".
_doing: list[str] = []


def calls_of(group: dist.ProcessGroup) -> Calls:
    """Return this rank's calls in ``group``, and in the group of which it is the host group."""
    found = _calls.get(group)
    if found is None:
        parent = parent_of(group)
        found = _calls[group] = Calls() if parent is group else calls_of(parent)
    return found


def groups_with_calls() -> list[dist.ProcessGroup]:
    """Return the groups in which this thread makes calls."""
    thread = threading.get_ident()
    return [g for g, calls in list(_calls.items()) if calls.thread == thread and parent_of(g) is g]


def barrier_begun() -> None:
    """Note that this rank has begun a barrier of torch's without waiting for it, while it may make other calls."""
    _State.has_begun_barriers = True


def unit_names(group: dist.ProcessGroup) -> dict[int, str]:
    """Return the names of units by id, for error texts of collectives over ``group``; callers add theirs."""
    return _unit_names.setdefault(parent_of(group), {})


class doing:
    """Names the caller's operation in errors of collectives inside the block."""

    __slots__ = ("_operation",)

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        _doing.append(self._operation)

    def __exit__(self, *_: object) -> None:
        _doing.pop()


def mismatch(rank: int, theirs: str, there: Place, own_rank: int, ours: str, here: Place) -> RankMismatchError:
    """Return the error for two ranks that came to different collectives, at their places in training."""
    return RankMismatchError(
        f"Rank {rank} of the group came to {theirs} where rank {own_rank} came to {ours}: they do not run the same "
        f"units in the same order. Rank {rank} is {there}; rank {own_rank} is {here}. Check that every rank builds the "
        "same model and takes the same branches, and that an exception on one rank alone was not caught."
    )


def _alone(rank: int, collective: str, other: int) -> UsageError:
    """Return the error for a rank that is in a collective while another one waits for it in a barrier."""
    return UsageError(
        f"Rank {rank} of the group waits for rank {other} in {collective}, and rank {other} waits for rank {rank} in "
        "torch.distributed.barrier(), so neither can go on. Every rank must make the call that is under way on rank "
        f'{rank}: do not make it on some ranks only, as in "if rank == 0". The barrier goes before or after it on all.'
    )


class StallDetector:
    """Compares the calls of ranks during one wait of this rank: in a collective, or in a barrier of torch's.

    ``barrier_ranks`` are the global ranks of that barrier, None for a collective.
    """

    def __init__(self, rank_group: RankGroup, barrier_ranks: Sequence[int] | None = None) -> None:
        self.rank_group = rank_group
        self._barrier_ranks = barrier_ranks
        # What other ranks have shown, by rank, at looks that found a difference.
        self._suspected: dict[int, set[str]] = {}

    def difference(self) -> Exception | None:
        """Show this rank's calls; return an error if another rank waits too, and each waits for the other."""
        group, own_rank = self.rank_group.process_group, self.rank_group.rank
        calls = calls_of(group)
        if calls.has_failed:
            return None
        names = unit_names(group)
        ours: dict[int, list[Any]] = {}
        for number, unit, operation in list(calls.last):
            ours[number] = [unit, operation, f"{operation} of unit {names.get(unit)!r}" if unit else operation]
        if ours and _doing:
            ours[calls.number][2] += f", in {_doing[-1]}"
        shown: dict[int, str] = {}

        def exchange(store: dist.Store) -> None:
            # The time tells what is shown now from what was shown before.
            wait = [time.monotonic_ns(), self._barrier_ranks, _State.has_begun_barriers, Progress.place]
            store.set(_KEY % own_rank, json.dumps([*wait, *ours.items()]))
            for rank in self.rank_group.others:
                if store.check([_KEY % rank]):
                    shown[rank] = store.get(_KEY % rank).decode()

        ask_store(parent_of(group), exchange)
        for rank, text in dict(shown).items():
            _, barrier, has_begun, place, *last = json.loads(text)
            error = self._error(rank, barrier, has_begun, Place(*place), dict(last), ours, calls.number)
            if error is None:
                continue
            suspected = self._suspected.setdefault(rank, set())
            suspected.add(text)
            # The first may be left from an earlier wait. A rank that was stopped may show once more that it waits in a
            # barrier which has ended meanwhile.
            if len(suspected) > (1 if barrier is None else 2):
                # The other rank finds the same, once this one has shown it twice.
                ask_store(parent_of(group), exchange)
                return error
        return None

    def _error(
        self,
        rank: int,
        barrier: list[int] | None,
        has_begun: bool,
        place: Place,
        theirs: dict[int, list[Any]],
        ours: dict[int, list[Any]],
        number: int,
    ) -> Exception | None:
        """Return the error if this rank and another one, in what it shows, wait for each other.

        Args:
            rank: the other rank.
            barrier: the global ranks of a barrier of torch's, if it waits there.
            has_begun: it has begun a barrier without waiting for it, so it may not be the one that is missing there.
            place: where it is in training.
            theirs, ours: the last calls, by number.
            number: of this rank's last call.
        """
        own_rank, last = self.rank_group.rank, max(theirs, default=0)
        for each, (unit, operation, described) in theirs.items():
            if each in ours and ours[each][:2] != [unit, operation]:
                return mismatch(rank, described, place, own_rank, ours[each][2], Progress.place)
        waits_in_barrier = self._barrier_ranks is not None
        if (barrier is not None) == waits_in_barrier:
            return None
        if barrier is not None and last < number and not _State.has_begun_barriers and dist.get_rank() in barrier:
            return _alone(own_rank, ours[max(last + 1, min(ours))][2], rank)
        ranks = global_ranks(self.rank_group.process_group)
        if number < last and not has_begun and ranks[rank] in (self._barrier_ranks or ()):
            return _alone(rank, theirs[max(number + 1, min(theirs))][2], own_rank)
        return None
