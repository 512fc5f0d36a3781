"""Forwards that one replica runs alone, which no backward reaches."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import torch

from .action_kinds import ActionKind
from .case import Action, Case
from .models import as_rank
from .session import Session, State, flattened


def replicas_of(case: Case) -> list[range]:
    """Return the ranks of each replica of a case: those that all-gather together."""
    options = case.options
    if case.rows is None and options.strategy == "NO_SHARD":
        return [range(rank, rank + 1) for rank in range(case.num_ranks)]
    num_replicas = options.mesh[0] if len(options.mesh) == 2 else 1
    size = case.num_ranks // num_replicas
    return [range(start, start + size) for start in range(0, case.num_ranks, size)]


class Alone(ActionKind):
    """Forwards of one replica, with or without graphs, which are kept until an action that needs idle units."""

    kind = "alone"
    weight = 5
    is_basic = True

    def applies(self, case: Case) -> bool:
        return len(replicas_of(case)) > 1

    def is_legal(self, state: State, case: Case) -> bool:
        return True

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {
            "replica": rng.randrange(len(replicas_of(case))),
            "count": rng.choice([1, 1, 2, 3]),
            "train": rng.random() < 0.6,
            "grad": rng.random() < 0.7,
            "keep": rng.random() < 0.5,
        }

    def run(self, session: Session, action: Action) -> None:
        args, models, replicas = action.args, (session.model, session.plain), replicas_of(session.case)
        ranks = replicas[args["replica"] % len(replicas)]
        for model in models:
            model.train(args["train"])
        with ExitStack() as stack:
            if not args["grad"]:
                stack.enter_context(torch.no_grad())
            for index in range(args["count"]):
                self.forward(session, action.seed + index, ranks, keep=args["keep"])
        for model in models:
            model.train()

    def forward(self, session: Session, seed: int, ranks: range, *, keep: bool) -> None:
        """Run a forward of the replicas of ``ranks``, and of the sharded model on these ranks; compare its outputs."""
        for rank in ranks:
            with session.replica(rank) as plain:
                expected = flattened(plain(session.batch(seed, rank)))
            if rank == session.rank:
                mine = expected
        if session.rank in ranks:
            with as_rank(session.rank):
                outputs = flattened(session.model(session.batch(seed, session.rank)))
            session.compare("outputs of a replica alone", outputs, mine)
            session.alone += outputs if keep else []
