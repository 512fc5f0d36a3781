"""How long ranks wait for each other in tests: tenths of a second where programs wait for seconds, set here alone.

A wait for a rank that is late or absent is what such a test tests, and takes as long as the patience. Values of less
than a second are for what a rank does meanwhile (it looks, it warns); what ends a wait, the timeout of a group, has
room for a slow machine's step. ``make test-all`` has a test of each kind of wait with the values of the library. Where
the order of ranks matters, one waits until another tells it to go on: a sleep is no order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp_flat.comm import agreement, failures

from .torch_and_ours import default_store

# By module. That of agreement, after which rank 0 takes a call for one of its own alone, is set by a test of it only.
SHORT: dict[ModuleType, dict[str, float]] = {
    failures: {"WARN_AFTER_S": 0.1, "LOOK_AFTER_S": 0.1, "LOOK_INTERVAL_S": 0.05, "REPORT_TIMEOUT_S": 1.0},
    agreement: {"POLL_INTERVAL_S": 0.2},
}
# How much later than others a rank comes that is waited for: several times what they wait before they look.
LATE_S = 0.3
# Within which ranks are told of a failure, on a loaded machine too; much less than the minute of a group's timeout.
SECONDS = 15.0
# The timeout of a group in which ranks wait in vain.
TIMEOUT_S = 1.0


@contextmanager
def impatient(*, real: bool = False, **changes: float) -> Iterator[None]:
    """Have this rank look soon at others for which it waits, inside the block.

    Args:
        real: keep the values of the library.
        changes: other values of the module ``failures``, by their names.
    """
    with ExitStack() as stack:
        for module, values in () if real else SHORT.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        if changes:
            stack.enter_context(mock.patch.multiple(failures, **changes))
        yield


@contextmanager
def alone_after(seconds: float) -> Iterator[None]:
    """Have rank 0 take a call for one of its own alone after so many seconds inside the block."""
    with mock.patch.object(agreement, "WARN_AFTER_S", seconds):
        yield


def tell(event: str) -> None:
    """Let the rank go on that waits for an event, now or later."""
    default_store().set(event, "")


def wait_until(event: str) -> None:
    """Wait until another rank has told of an event; one rank may wait for each that is told."""
    default_store().wait([event], timedelta(seconds=2 * SECONDS))
    default_store().delete_key(event)


@contextmanager
def logged(event: str | None = None) -> Iterator[list[str]]:
    """Collect the texts that the library logs inside the block, and tell of an event, if given, once there is one."""
    texts: list[str] = []

    def keep(record: logging.LogRecord) -> None:
        texts.append(record.getMessage())
        if event is not None and len(texts) == 1:
            tell(event)

    handler, logger = logging.Handler(), logging.getLogger("fsdp_flat")
    handler.emit = keep  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def give_up_soon(group: Any) -> None:
    """Have collectives of a group time out from now on, but not what made the group and its connections."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)
