"""Holds what guards do at the events of a step and of an optimizer; :mod:`guard` says which events there are.

The step and its units call these functions, and know nothing of guards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

LOGGER = logging.getLogger("fsdp_flat")


@dataclass(slots=True)
class Events:
    """Holds for each event the functions to call, in their order; for their arguments see :class:`guard.Guard`."""

    tree_built: tuple[Callable[..., object], ...] = ()
    before_reuse: tuple[Callable[..., object], ...] = ()
    after_compute: tuple[Callable[..., object], ...] = ()
    before_backward: tuple[Callable[..., object], ...] = ()
    after_reduce: tuple[Callable[..., object], ...] = ()
    before_optimizer: tuple[Callable[..., object], ...] = ()
    step_raised: tuple[Callable[..., object], ...] = ()


# The events of every tree in the process.
EVENTS = Events()
