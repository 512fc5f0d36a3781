"""The base of a program's actions, and their registry."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from .case import FRONTS, Action, Case, nodes_of
from .session import Session, State

ACTIONS: dict[str, ActionKind] = {}


class ActionKind:
    """A kind of action. Subclasses are registered under their ``kind``.

    Attributes:
        kind: its name.
        weight: how often it comes.
        is_basic: every program may have it; others are in some programs only.
        fronts: the fronts that have it, of ``case.FRONTS``.
    """

    kind: ClassVar[str]
    weight: ClassVar[float] = 1.0
    is_basic: ClassVar[bool] = False
    fronts: ClassVar[tuple[str, ...]] = FRONTS

    def __init_subclass__(cls) -> None:
        ACTIONS[cls.kind] = cls()

    def applies(self, case: Case) -> bool:
        """Whether the front of the case has it."""
        return case.front in self.fronts

    def is_legal(self, state: State, case: Case) -> bool:
        """Whether it may come now."""
        return state.is_between_steps

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        """Choose its arguments: what JSON can hold."""
        return {}

    def advance(self, state: State, action: Action) -> None:
        """Say what it does to what is legal next."""

    def run(self, session: Session, action: Action) -> None:
        """Do it on both models and compare. Every rank must call this."""
        raise NotImplementedError


def random_uses(rng: random.Random, case: Case) -> list[list[int]]:
    """Choose for each rank the outputs that its loss uses: often all, the same on every rank, or of each rank's own."""
    outputs = list(range(len(case.model.children)))

    def some() -> list[int]:
        return [index for index in outputs if rng.random() < 0.5] or [rng.choice(outputs)]

    how = rng.random()
    if how < 0.5:
        return [outputs] * case.num_ranks
    if how < 0.7:
        return [some()] * case.num_ranks
    return [some() for _ in range(case.num_ranks)]


def is_reentrant(case: Case) -> bool:
    """Whether a part is checkpointed in the re-entrant way, with which torch refuses ``autograd.grad``."""
    return any(node.reentrant for node in nodes_of(case.model))
