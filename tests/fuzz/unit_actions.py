"""Actions on single units: called, unsharded and resharded by hand, controlled."""

from __future__ import annotations

import random
from typing import Any

from .action_kinds import ActionKind
from .case import Action, Case, nodes_of
from .models import Part, as_rank
from .row_session import RowSession
from .session import NotLegal, Session, State


def is_shared(case: Case, module: Part) -> bool:
    """Whether other places use modules or parameters inside ``module``, so that it cannot run without other units."""
    inside = {getattr(child, "node_id", -1) for child in module.modules()}
    return any(node.refers >= 0 and (node.refers in inside or node.id in inside) for node in nodes_of(case.model))


class CallUnit(ActionKind):
    """Train a unit that is called by itself."""

    kind = "unit"
    weight = 1.5

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"index": rng.randrange(100)}

    def run(self, session: Session, action: Action) -> None:
        units = [
            (unit, module)
            for unit, module in session.callable_units()
            if isinstance(module, Part) and not is_shared(session.case, module)
        ]
        if not units:
            raise NotLegal("no unit")
        unit, module = units[action.args["index"] % len(units)]
        other = next(m for m in session.plain.modules() if getattr(m, "node_id", -1) == module.node_id)
        inputs = session.batches(action.seed)
        kept = session.copied_buffers()
        losses = []
        for rank, x in enumerate(inputs):
            with session.replica(rank):
                losses.append(other(x).tanh().square().mean())
        if not all(loss.requires_grad for loss in losses):
            session.buffers = kept
            raise NotLegal("a loss without a gradient")
        session.backward_replica(losses)
        session.fill_zeros()
        with as_rank(session.rank):
            loss = unit(inputs[session.rank]).tanh().square().mean()
            loss.backward()
        session.compare("losses", loss.detach(), losses[session.rank].detach())


def sharded_modules(session: Session) -> list[Any]:
    """Return the modules of ``fully_shard`` in a session."""
    assert isinstance(session, RowSession)
    units = session.sharded_modules()
    if not units:
        raise NotLegal("no unit")
    return units


class Unshard(ActionKind):
    """``unshard`` of one unit, at once or begun only, and perhaps ``reshard``."""

    kind = "unshard"
    fronts = ("fully_shard",)
    weight = 2

    def is_legal(self, state: State, case: Case) -> bool:
        return True

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        how = rng.choice(["at once", "wait", "begin", "begin"])
        return {"index": rng.randrange(100), "how": how, "reshard": rng.random() < 0.4}

    def run(self, session: Session, action: Action) -> None:
        units = sharded_modules(session)
        unit = units[action.args["index"] % len(units)]
        handle = unit.unshard(async_op=action.args["how"] != "at once")
        if handle is not None and action.args["how"] == "wait":
            handle.wait()
        if action.args["how"] != "begin":
            session.compare_shown(unit)
        if action.args["reshard"]:
            unit.reshard()


class Reshard(ActionKind):
    """``reshard`` of one unit, or of all."""

    kind = "reshard"
    fronts = ("fully_shard",)
    weight = 2

    def is_legal(self, state: State, case: Case) -> bool:
        return True

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"index": rng.randrange(100), "all": rng.random() < 0.3}

    def run(self, session: Session, action: Action) -> None:
        units = sharded_modules(session)
        for unit in units if action.args["all"] else [units[action.args["index"] % len(units)]]:
            unit.reshard()


class Control(ActionKind):
    """``set_reshard_after_forward`` or ``set_reshard_after_backward`` of one unit, with or without those below."""

    kind = "control"
    fronts = ("fully_shard",)
    weight = 2

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {
            "index": rng.choice([0, rng.randrange(100)]),
            "which": rng.choice(["forward", "backward"]),
            "on": rng.random() < 0.5,
            "recurse": rng.random() < 0.7,
        }

    def run(self, session: Session, action: Action) -> None:
        units = sharded_modules(session)
        unit = units[action.args["index"] % len(units)]
        change = getattr(unit, f"set_reshard_after_{action.args['which']}")
        change(action.args["on"], recurse=action.args["recurse"])
