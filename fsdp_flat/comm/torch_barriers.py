"""Waits in ``torch.distributed.barrier``, and lets other ranks know that this one waits there (``calls``)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm import failures
from fsdp_flat.comm.calls import StallDetector, groups_with_calls
from fsdp_flat.comm.failures import failure_in, is_over, reason_of, report_error
from fsdp_flat.comm.rank_groups import RankGroup, connected, global_ranks, moves_by_gloo, parent_of
from fsdp_flat.errors import UsageError

_logger = logging.getLogger("fsdp_flat")
_CPU = torch.device("cpu")
_WHAT = "torch.distributed.barrier()"


def _compared() -> list[RankGroup]:
    """Return the groups in which other ranks may wait for calls of this one, without those that were destroyed."""
    found = []
    for group in groups_with_calls():
        with suppress(ValueError, UsageError):
            found += connected([RankGroup.of(group)])
    return found


def is_compared(group: dist.ProcessGroup) -> bool:
    """Return whether this rank is in ``group`` and has made calls that other ranks of it may wait for."""
    return dist.get_rank(group) >= 0 and bool(groups_with_calls()) and bool(connected([RankGroup.of(group)]))


def wait_in_barrier(begin: Callable[[bool], Any], group: dist.ProcessGroup) -> None:
    """Run a barrier of torch's over ``group``: ``begin(True)`` returns its work, ``begin(False)`` waits for it.

    Every rank of the group must call this.

    Raises:
        UsageError: another rank waits for this one in a collective of this library, which it has not called.
        PeerFailureError: the barrier failed.
    """
    ranks = global_ranks(group)
    detectors = [StallDetector(rank_group, ranks) for rank_group in _compared()]
    try:
        if dist.get_backend(group) == "gloo" and moves_by_gloo(group, _CPU):
            _wait(begin(True), detectors)
        else:
            with _shown_while_waiting(detectors):
                begin(False)
    except UsageError:
        raise
    except RuntimeError as error:
        if parent_of(group) not in groups_with_calls():
            raise
        raise failure_in(_WHAT, RankGroup.of(group), reason_of(error)) from error


def _wait(work: Any, detectors: Sequence[StallDetector]) -> None:
    """Wait for the work of a gloo barrier; look at other ranks meanwhile."""
    begun = time.monotonic()
    seconds = failures.LOOK_AFTER_S
    while not is_over(work, seconds):
        for detector in detectors:
            if (error := detector.difference()) is not None:
                report_error([detector.rank_group], error)
                raise error
        seconds = max(failures.LOOK_INTERVAL_S, (time.monotonic() - begun) / 10)


@contextmanager
def _shown_while_waiting(detectors: Sequence[StallDetector]) -> Iterator[None]:
    """Show from a thread that this rank waits, since the backend blocks the host; log what is found."""
    ended = threading.Event()

    def run() -> None:
        is_logged = ended.wait(failures.LOOK_AFTER_S)
        while not ended.is_set():
            # The barrier may end meanwhile, and the rank go on to other calls.
            with suppress(Exception):
                for detector in detectors:
                    if (error := detector.difference()) is not None and not is_logged:
                        is_logged = True
                        _logger.error("%s", error)
            ended.wait(failures.LOOK_INTERVAL_S)

    threading.Thread(target=run, name="fsdp_flat_barrier", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
