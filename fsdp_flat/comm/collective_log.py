"""Logs the order in which a rank issues collectives, for comparison with other ranks.

An all-gather of one unit that is paired with another unit's all-gather of the same size succeeds and mixes their
weights. Only the shared-memory transport detects that itself, so ranks compare their logs before an optimizer steps.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Protocol

from fsdp_flat.comm.rank_groups import ShardingGroups

DIGEST_NBYTES = 8
# A program that only evaluates never compares logs, so a long log is folded into a digest.
_MOST_ENTRIES = 1 << 16
_CODES = {"all-gather": 1, "reduction": 2}


class LoggedUnit(Protocol):
    """Describes the unit attributes that the log reads."""

    unit_id: int
    name: str


class CollectiveLog:
    """Records the collectives issued since the last comparison between ranks, by sharding groups."""

    def __init__(self) -> None:
        self._issued: dict[ShardingGroups, list[tuple[str, LoggedUnit]]] = {}
        self._folded: dict[ShardingGroups, tuple[int, bytes]] = {}

    def of(self, groups: ShardingGroups) -> list[tuple[str, LoggedUnit]]:
        """Return the list to which callers append ``(operation, unit)`` for each collective over ``groups``."""
        return self._issued.setdefault(groups, [])

    def digest(self, groups: ShardingGroups) -> bytes:
        """Return an 8-byte digest of the log of ``groups``, equal on ranks that issued the same collectives."""
        issued = self.of(groups)
        count, folded = self._folded.get(groups, (0, b""))
        entries = array("q", [part for operation, unit in issued for part in (_CODES[operation], unit.unit_id)])
        content = folded + (count + len(issued)).to_bytes(8, "big") + entries.tobytes()
        return hashlib.blake2b(content, digest_size=DIGEST_NBYTES).digest()

    def lines(self, groups: ShardingGroups) -> list[str]:
        """Return one readable line for each collective issued over ``groups``."""
        count, _ = self._folded.get(groups, (0, b""))
        earlier = [f"{count} earlier collectives"] if count else []
        return earlier + [f"the {operation} of unit {unit.name!r}" for operation, unit in self.of(groups)]

    def trim(self) -> None:
        """Fold long logs into digests."""
        for groups, issued in self._issued.items():
            if len(issued) > _MOST_ENTRIES:
                count, _ = self._folded.get(groups, (0, b""))
                self._folded[groups] = (count + len(issued), self.digest(groups))
                issued.clear()

    def clear(self) -> None:
        """Clear all logs, after a comparison between ranks or an aborted step."""
        self._folded.clear()
        for issued in self._issued.values():
            issued.clear()
