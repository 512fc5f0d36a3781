"""Holds how callers want the state dicts of a unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_flat.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateHandler,
    StateDictSettings,
    StateDictType,
)
from fsdp_flat.core import Unit


def _full() -> StateDictSettings:
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


@dataclass(eq=False, slots=True)
class UnitStateSettings:
    """Holds what callers have set for the state dicts of one unit.

    Attributes:
        state_dict: the type, and the configs of models and optimizers.
        optim_handlers: by name of a state of an optimizer, how it is merged and split.
    """

    state_dict: StateDictSettings = field(default_factory=_full)
    optim_handlers: dict[str, OptimStateHandler] = field(default_factory=dict)


def own_settings(unit: Unit) -> UnitStateSettings:
    """Return what callers have set for the state dicts of a unit."""
    return unit.attached(UnitStateSettings)
