"""Detects a collective that was called on one rank only, before any data is sent."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from fsdp_flat.comm._torch import group_store
from fsdp_flat.comm.rank_groups import RankGroup, is_fake
from fsdp_flat.comm.shm import known_transport
from fsdp_flat.errors import UsageError
from fsdp_flat.user_warnings import warn_user

WARN_AFTER_S = 20.0
POLL_INTERVAL_S = 1.0


def barrier(what: str, rank_group: RankGroup) -> None:
    """Wait for all ranks of a group through its store, without a collective.

    Every rank of the group must call this. Each rank sends three requests to the store.

    Work of a single rank (evaluating, writing files) is mostly done on rank 0, so other ranks may wait for it for
    minutes; they only warn. If rank 0 waits for 20 seconds and no other rank arrives, the call is assumed to be on
    rank 0 only. If ranks share memory, a rank that sends a different collective is detected within a second.

    Args:
        what: the caller's operation, for error texts.
        rank_group: the ranks.

    Raises:
        UsageError: if this is rank 0 and no other rank has arrived, if another rank sends a different collective, or
            if a rank has not arrived within the default process-group timeout.
    """
    group = rank_group.group
    if group is None or rank_group.size == 1 or is_fake(group):
        return
    store_barrier = _StoreBarrier(group_store(group), rank_group)
    if store_barrier.is_complete:
        return
    limit = default_pg_timeout.total_seconds()
    patience = min(WARN_AFTER_S, limit)
    transport = known_transport(rank_group)
    begun = time.monotonic()
    warned = False
    has_arrived, seconds = store_barrier.wait, patience if transport is None else min(patience, POLL_INTERVAL_S)
    while not has_arrived(seconds):
        waited = time.monotonic() - begun
        has_arrived, seconds = store_barrier.poll, min(waited / 20, POLL_INTERVAL_S)
        if transport is not None and (found := transport.unexpected()) is not None and store_barrier.leave():
            other, collective = found
            raise UsageError(
                f"{what} was called on rank {rank_group.rank} of the group, and rank {other} has not called it but "
                f"goes on with {collective}. It is a collective: every rank of the group must call it, at the same "
                "point."
            )
        if waited < patience or (warned and rank_group.rank and waited < limit):
            continue
        missing = store_barrier.missing()
        if (len(missing) == rank_group.size - 1 and rank_group.rank == 0) or waited >= limit:
            if store_barrier.leave():
                raise UsageError(
                    f"{what} was called on rank {rank_group.rank} of the group {waited:.0f} seconds ago, and rank(s) "
                    f"{missing} have not called it. It is a collective: every rank of the group must call it, also "
                    "those that do not use the result (rank0_only=True leaves theirs empty). If they are only late, "
                    "call torch.distributed.barrier() before it."
                )
            return
        if not warned and missing:
            warned = True
            warn_user(
                f"{what} on rank {rank_group.rank} of the group has waited {waited:.0f} seconds for rank(s) {missing}; "
                "every rank must call it.",
                stacklevel=4,
            )


class _StoreBarrier:
    """Implements the n-th barrier of a group, where n counts this rank's arrivals.

    Each rank increments its counter and the barrier's in the store, and the last to arrive sets a key.
    """

    def __init__(self, store: dist.Store, rank_group: RankGroup) -> None:
        self._store = store
        self._rank_group = rank_group
        self._index = index = store.add(f"fsdp_flat/came/{rank_group.rank}", 1)
        self.is_complete = store.add(f"fsdp_flat/meeting/{index}", 1) == rank_group.size
        if self.is_complete:
            store.set(f"fsdp_flat/complete/{index}", "")
            # All ranks have arrived here, so all have left the previous barrier.
            store.delete_key(f"fsdp_flat/meeting/{index - 1}")
            store.delete_key(f"fsdp_flat/complete/{index - 1}")

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds``, and return whether all ranks have arrived."""
        try:
            self._store.wait([f"fsdp_flat/complete/{self._index}"], timedelta(seconds=seconds))
        except RuntimeError as error:
            if "imeout" not in str(error):
                raise
            return False
        return True

    def poll(self, seconds: float) -> bool:
        """Sleep, and return whether all ranks have arrived; torch prints two warnings for each wait that times out."""
        time.sleep(seconds)
        return self._store.check([f"fsdp_flat/complete/{self._index}"])

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived."""
        ranks = range(self._rank_group.size)
        return [rank for rank in ranks if self._store.add(f"fsdp_flat/came/{rank}", 0) < self._index]

    def leave(self) -> bool:
        """Withdraw this rank's arrival, and return True; return False if all ranks have arrived in the meantime."""
        if self._store.add(f"fsdp_flat/meeting/{self._index}", -1) == self._rank_group.size - 1:
            self._store.add(f"fsdp_flat/meeting/{self._index}", 1)
            return False
        self._store.add(f"fsdp_flat/came/{self._rank_group.rank}", -1)
        return True
