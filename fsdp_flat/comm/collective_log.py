"""The order in which a rank has issued collectives, for comparison with that of other ranks.

An all-gather of one unit that meets an all-gather of another unit of the same size succeeds and mixes their weights.
No transport but shared memory can notice that by itself, so ranks compare their logs before an optimizer can step.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Protocol

from fsdp_flat.comm.rank_groups import ShardingGroups

__all__ = ["CollectiveLog", "LoggedUnit"]

DIGEST_NBYTES = 8
# A program that only evaluates never compares; its log is folded into a digest now and then.
_MOST_ENTRIES = 1 << 16
_CODES = {"all-gather": 1, "reduction": 2}


class LoggedUnit(Protocol):
    """A unit as the log needs it."""

    unit_id: int
    name: str


class CollectiveLog:
    """Collectives issued since ranks last compared, by the groups that they run over."""

    def __init__(self) -> None:
        self._issued: dict[ShardingGroups, list[tuple[str, LoggedUnit]]] = {}
        self._folded: dict[ShardingGroups, tuple[int, bytes]] = {}

    def of(self, groups: ShardingGroups) -> list[tuple[str, LoggedUnit]]:
        """The list to which ``(operation, unit)`` is appended where a collective over ``groups`` is issued."""
        return self._issued.setdefault(groups, [])

    def digest(self, groups: ShardingGroups) -> bytes:
        """Stands for everything issued over ``groups``: 8 bytes, equal on ranks that issued the same."""
        issued = self.of(groups)
        count, folded = self._folded.get(groups, (0, b""))
        entries = array("q", [part for operation, unit in issued for part in (_CODES[operation], unit.unit_id)])
        content = folded + (count + len(issued)).to_bytes(8, "big") + entries.tobytes()
        return hashlib.blake2b(content, digest_size=DIGEST_NBYTES).digest()

    def lines(self, groups: ShardingGroups) -> list[str]:
        """The collectives issued over ``groups``, one line each, for people."""
        count, _ = self._folded.get(groups, (0, b""))
        earlier = [f"{count} earlier collectives"] if count else []
        return earlier + [f"the {operation} of unit {unit.name!r}" for operation, unit in self.of(groups)]

    def trim(self) -> None:
        """Folds a log that has become long."""
        for groups, issued in self._issued.items():
            if len(issued) > _MOST_ENTRIES:
                count, _ = self._folded.get(groups, (0, b""))
                self._folded[groups] = (count + len(issued), self.digest(groups))
                issued.clear()

    def clear(self) -> None:
        """Forgets everything: ranks have compared, or a step was given up."""
        self._folded.clear()
        for issued in self._issued.values():
            issued.clear()
