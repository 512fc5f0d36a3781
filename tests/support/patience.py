"""How long ranks wait for each other in tests: tenths of a second where programs wait for seconds, set here alone.

A wait for a rank that is late or absent is what such a test tests, and takes as long as the patience. Values of less
than a second are for what a rank does meanwhile (it looks, it warns); what ends a wait, the timeout of a group, has
room for a slow machine's step. ``make test-all`` has a test of each kind of wait with the values of the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp_flat.comm import agreement, failures

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


def give_up_soon(group: Any) -> None:
    """Have collectives of a group time out from now on, but not what made the group and its connections."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)
