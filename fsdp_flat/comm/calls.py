"""Finds two ranks that wait for each other in different collectives of a group, long before the group's timeout.

Ranks of a group make the same calls in the same order. Each rank keeps the last calls of a group, by number; that is
all that a step does for it. A rank that has waited for seconds shows its calls in the group's store, again at every
look, and reads what others show. Where two ranks made different calls of one number, neither of them can end, which is
an error on both. Nothing else is one: a rank that shows nothing computes or is late, and may come; a rank that shows
fewer calls may make the others. A difference counts once the other rank has shown it twice while this one waits, so it
waits too, and what it shows is not left from an earlier wait. After a failure of this rank, which a caller may catch,
its numbers may differ from those of others, so it shows nothing any more.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.comm.torch_comm import ask_store
from fsdp_flat.errors import RankMismatchError

# Key, in the store of a group, for what a rank shows.
_KEY = "fsdp_flat/calls/%d"
# More than ranks get apart before each waits for another. Without a number in common, ranks find no difference.
_MOST_CALLS = 64


class Calls:
    """Holds the last calls of this rank in a group: number, id of the unit or 0, and operation.

    ``has_failed``: a collective of this rank has raised.
    """

    def __init__(self) -> None:
        self.last: deque[tuple[int, int, str]] = deque(maxlen=_MOST_CALLS)
        self.number = 0
        self.has_failed = False

    def add(self, operation: str, unit: int = 0) -> None:
        """Note a call, before it sends anything."""
        self.number += 1
        self.last.append((self.number, unit, operation))

    def withdraw(self) -> None:
        """Forget the last call, which has sent nothing that other ranks wait for."""
        self.last.pop()
        self.number -= 1


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, Calls] = weakref.WeakKeyDictionary()
_unit_names: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]] = weakref.WeakKeyDictionary()


def calls_of(group: dist.ProcessGroup) -> Calls:
    """Return this rank's calls in ``group``."""
    return _calls.setdefault(group, Calls())


def unit_names(group: dist.ProcessGroup) -> dict[int, str]:
    """Return the names of units by id, for error texts of collectives over ``group``; callers add theirs."""
    return _unit_names.setdefault(group, {})


def mismatch(rank: int, theirs: str, own_rank: int, ours: str) -> RankMismatchError:
    """Return the error for two ranks that came to different collectives."""
    return RankMismatchError(
        f"Rank {rank} of the group came to {theirs} where rank {own_rank} came to {ours}: they do not run the same "
        "units in the same order. Check that every rank builds the same model and takes the same branches, and that "
        "an exception on one rank alone was not caught."
    )


class Looks:
    """Compares the calls of ranks during one wait of this rank."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._number = 0
        # What other ranks have shown, by rank, at the first look that found a difference.
        self._suspected: dict[int, bytes] = {}

    def difference(self) -> RankMismatchError | None:
        """Show this rank's calls; return an error if another rank waits too, and has made another call of a number."""
        group, own_rank = self._rank_group.group, self._rank_group.rank
        assert group is not None
        if calls_of(group).has_failed:
            return None
        self._number += 1
        names = unit_names(group)
        ours: dict[int, list[Any]] = {}
        for number, unit, operation in calls_of(group).last:
            ours[number] = [unit, operation, f"{operation} of unit {names.get(unit)!r}" if unit else operation]
        shown: dict[int, bytes] = {}

        def exchange(store: dist.Store) -> None:
            store.set(_KEY % own_rank, json.dumps([self._number, *ours.items()]))
            for rank in self._rank_group.others:
                if store.check([_KEY % rank]):
                    shown[rank] = store.get(_KEY % rank)

        with suppress(Exception):  # the group may be gone
            ask_store(group, exchange)
        for rank, text in dict(shown).items():
            for number, (unit, operation, described) in json.loads(text)[1:]:
                if number in ours and ours[number][:2] != [unit, operation]:
                    if self._suspected.setdefault(rank, text) != text:
                        return mismatch(rank, described, own_rank, ours[number][2])
                    break
        return None
