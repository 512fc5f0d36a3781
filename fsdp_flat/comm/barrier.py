"""Finding out that a collective was called on one rank only, before anything is sent."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from fsdp_flat.comm._torch import group_store
from fsdp_flat.comm.host_transports import known_transport
from fsdp_flat.comm.rank_groups import RankGroup, is_simulated
from fsdp_flat.errors import UsageError

__all__ = ["barrier"]

PATIENCE_S = 20.0
GLANCE_S = 1.0


def barrier(what: str, rank_group: RankGroup) -> None:
    """Wait for the other ranks of a group by way of the group's store, which leaves the group as it is.

    Every rank of the group must call this. Costs each rank three requests to the store.

    Rank 0 does most of what one rank does alone (evaluating, writing files), so others may wait for it for minutes;
    they only warn. That rank 0 waits and nobody else has come for 20 seconds is taken for a call on rank 0 only. Where
    ranks share memory, a rank that sends something else in the meantime is found out at once.

    Args:
        what: what is called, for the texts.
        group: the ranks.

    Raises:
        UsageError: this is rank 0 and no other rank has come; another rank does something else; or not all have come
            within the group's timeout.
    """
    group = rank_group.group
    if group is None or rank_group.size == 1 or is_simulated(group):
        return
    meeting = _StoreBarrier(group_store(group), rank_group)
    if meeting.is_complete:
        return
    limit = default_pg_timeout.total_seconds()
    patience = min(PATIENCE_S, limit)
    transport = known_transport(rank_group)
    begun = time.monotonic()
    warned = False
    while not meeting.wait(patience if transport is None else min(patience, GLANCE_S)):
        if transport is not None and (found := transport.unexpected()) is not None and meeting.leave():
            other, doing = found
            raise UsageError(
                f"{what} was called on rank {rank_group.rank} of the group, and rank {other} has not called it but goes on "
                f"with {doing}. It is a collective: every rank of the group must call it, at the same point."
            )
        waited = time.monotonic() - begun
        if waited < patience:
            continue
        missing = meeting.missing()
        if (len(missing) == rank_group.size - 1 and rank_group.rank == 0) or waited >= limit:
            if meeting.leave():
                raise UsageError(
                    f"{what} was called on rank {rank_group.rank} of the group {waited:.0f} seconds ago, and rank(s) "
                    f"{missing} have not called it. It is a collective: every rank of the group must call it, also "
                    "those that do not use the result (rank0_only=True leaves theirs empty). If they are only late, "
                    "call torch.distributed.barrier() before it."
                )
            return
        if not warned and missing:
            warned = True
            warnings.warn(
                f"{what} on rank {rank_group.rank} of the group has waited {waited:.0f} seconds for rank(s) {missing}; every "
                "rank must call it.",
                stacklevel=4,
            )


class _StoreBarrier:
    """The n-th meeting of the ranks of a group, where n is how often this rank has come.

    Every rank counts its own coming in the store, and the last to come puts up a sign.
    """

    def __init__(self, store: dist.Store, rank_group: RankGroup) -> None:
        self._store = store
        self._axis = rank_group
        self._index = store.add(f"fsdp_flat/came/{rank_group.rank}", 1)
        self.is_complete = self._come()

    def _come(self) -> bool:
        if self._store.add(f"fsdp_flat/meeting/{self._index}", 1) < self._axis.size:
            return False
        self._store.set(f"fsdp_flat/complete/{self._index}", "")
        # Everybody has come here, so everybody has left the meeting before.
        self._store.delete_key(f"fsdp_flat/meeting/{self._index - 1}")
        self._store.delete_key(f"fsdp_flat/complete/{self._index - 1}")
        return True

    def wait(self, seconds: float) -> bool:
        """Whether all have come within ``seconds``."""
        try:
            self._store.wait([f"fsdp_flat/complete/{self._index}"], timedelta(seconds=seconds))
        except RuntimeError as error:
            if "imeout" not in str(error):
                raise
            return False
        return True

    def missing(self) -> list[int]:
        """Ranks that have not come."""
        ranks = range(self._axis.size)
        return [rank for rank in ranks if self._store.add(f"fsdp_flat/came/{rank}", 0) < self._index]

    def leave(self) -> bool:
        """Go away, as if this rank had not come; False if all have come in the meantime."""
        if self._store.add(f"fsdp_flat/meeting/{self._index}", -1) == self._axis.size - 1:
            self._store.add(f"fsdp_flat/meeting/{self._index}", 1)
            return False
        self._store.add(f"fsdp_flat/came/{self._axis.rank}", -1)
        return True
