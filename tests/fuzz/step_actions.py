"""Actions of training: forwards, backwards, gradients, optimizer steps."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .action_kinds import ActionKind, is_reentrant, random_uses
from .case import Action, Case, nodes_of
from .models import CURRENT, Trouble, as_rank
from .session import Mismatch, NotLegal, Session, State

# -- steps -----------------------------------------------------------------------------------------------------------


class Forward(ActionKind):
    kind = "forward"
    weight = 6
    is_basic = True

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending < 3

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"input_grad": rng.random() < 0.25}

    def advance(self, state: State, action: Action) -> None:
        state.num_pending += 1

    def run(self, session: Session, action: Action) -> None:
        session.pending.append(session.forward(action.seed, **action.args))
        session.num_pending += 1


class Backward(ActionKind):
    """The backward of one waiting forward, or of a sum over all of them."""

    kind = "backward"
    weight = 14
    is_basic = True

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending > 0

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {
            "which": rng.choice([0, 0, 1, 2]),
            "all": rng.random() < 0.25,
            "retain": rng.random() < 0.15,
            "uses": random_uses(rng, case),
        }

    def advance(self, state: State, action: Action) -> None:
        if not action.args["retain"]:
            state.num_pending = 0 if action.args["all"] else state.num_pending - 1
        state.unsynced = False

    def run(self, session: Session, action: Action) -> None:
        chosen = self.chosen(session, action)
        retain = action.args["retain"]
        if not retain:
            session.pending = [one for one in session.pending if one not in chosen]
        session.num_pending = len(session.pending)
        session.backward(chosen, action.args["uses"], retain=retain, synced=True)
        session.unsynced = False

    def chosen(self, session: Session, action: Action) -> list[Any]:
        if action.args["all"]:
            return list(session.pending)
        return [session.pending[action.args["which"] % len(session.pending)]]


class Train(ActionKind):
    """A whole step: forward, backward, optimizer, zero_grad."""

    kind = "train"
    weight = 8
    is_basic = True

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending == 0

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"uses": random_uses(rng, case), "set_to_none": rng.random() < 0.7}

    def advance(self, state: State, action: Action) -> None:
        state.unsynced = False

    def run(self, session: Session, action: Action) -> None:
        one = session.forward(action.seed)
        session.backward([one], action.args["uses"], retain=False, synced=True)
        session.unsynced = False
        session.compare_after_action()
        for optim in (session.optim, session.plain_optim):
            optim.step()
            optim.zero_grad(set_to_none=action.args["set_to_none"])


class Accumulate(ActionKind):
    """Forwards and backwards inside ``no_sync``, or with ``set_requires_gradient_sync(False)``."""

    kind = "accumulate"
    weight = 4

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending < 2

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {
            "mode": rng.choice(["local", "local", "sharded"]) if case.rows is None else "local",
            "uses": [random_uses(rng, case) for _ in range(rng.choice([1, 1, 2]))],
        }

    def advance(self, state: State, action: Action) -> None:
        state.unsynced = state.unsynced or action.args["mode"] == "local"

    def run(self, session: Session, action: Action) -> None:
        mode = action.args["mode"]
        for index, uses in enumerate(action.args["uses"]):
            with session.unreduced(mode):
                one = session.forward(action.seed + index)
                session.backward([one], uses, retain=False, synced=False)
            if mode == "local":
                session.unsynced = True
            else:
                session.gradients_reduced()
                if not session.unsynced:
                    session.fill_zeros()


class InputGradient(ActionKind):
    """``autograd.grad`` with respect to the input, which leaves gradients of parameters alone."""

    kind = "input_gradient"
    weight = 2

    def is_legal(self, state: State, case: Case) -> bool:
        # A nested backward gives gradients to parameters too.
        has_edits = any(node.kind == "edited" for node in nodes_of(case.model))
        return state.num_pending < 3 and not is_reentrant(case) and not has_edits

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"uses": random_uses(rng, case), "then_backward": rng.random() < 0.4}

    def advance(self, state: State, action: Action) -> None:
        if action.args["then_backward"]:
            state.unsynced = False

    def run(self, session: Session, action: Action) -> None:
        one = session.forward(action.seed, input_grad=True)
        uses, retain = action.args["uses"], action.args["then_backward"]
        expected, loss_function = session.losses([one], uses)
        theirs = []
        for rank, loss in enumerate(expected):
            with session.replica(rank):
                theirs.append(torch.autograd.grad(loss, one.inputs[rank], retain_graph=retain)[0])
        with as_rank(session.rank):
            mine = torch.autograd.grad(loss_function(), one.input, retain_graph=retain)[0]
        session.compare("inputs' gradients", mine, theirs[session.rank])
        if retain:
            session.backward([one], uses, retain=False, synced=True)
            session.unsynced = False


class Evaluate(ActionKind):
    """A forward without a graph."""

    kind = "evaluate"
    weight = 2

    def is_legal(self, state: State, case: Case) -> bool:
        return True

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"mode": rng.choice(["no_grad", "inference", "eval", "eval no_grad"])}

    def run(self, session: Session, action: Action) -> None:
        mode = action.args["mode"]
        models = (session.model, session.plain)
        with ExitStack() as stack:
            if mode == "inference":
                stack.enter_context(torch.inference_mode())
            elif "no_grad" in mode:
                stack.enter_context(torch.no_grad())
            for model in models:
                model.train("eval" not in mode)
            session.forward(action.seed)
        for model in models:
            model.train()


class DropForwards(ActionKind):
    """Forget the graphs that wait."""

    kind = "drop"
    weight = 3

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending > 0

    def advance(self, state: State, action: Action) -> None:
        state.num_pending = 0

    def run(self, session: Session, action: Action) -> None:
        session.drop_pending()


class Fail(ActionKind):
    """A step in which every rank's model raises, and after it cleared gradients."""

    kind = "fail"
    weight = 2

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending == 0

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        where = rng.choice(["before", "after", "backward", "backward at the end"])
        ids = [node.id for node in nodes_of(case.model) if node.kind != "alias"]
        if where.startswith("backward"):
            # Ranks have to raise at the same point; those whose loss uses a branch reach its modules first.
            some = [node for branch in nodes_of(case.model) if branch.ranks for node in nodes_of(branch)]
            ids = [each for each in ids if each not in {id_ for node in some for id_ in (node.id, node.refers)}]
        return {"id": rng.choice(ids or [case.model.id]), "where": where, "no_sync": rng.random() < 0.2}

    def advance(self, state: State, action: Action) -> None:
        state.unsynced = False

    def run(self, session: Session, action: Action) -> None:
        def step(model: nn.Module, x: torch.Tensor) -> None:
            out = model(x)
            loss = sum(o.square().mean() for o in (out["out"], *out["sides"]))
            if loss.requires_grad:
                loss.backward()

        inputs = session.batches(action.seed)
        kept = session.copied_buffers()
        CURRENT.trouble = (action.args["id"], action.args["where"])
        raised = []
        try:
            for rank, x in enumerate(inputs):
                with session.replica(rank) as plain:
                    try:
                        step(plain, x)
                    except Trouble:
                        raised.append(rank)
            if len(raised) == session.num_ranks:
                with ExitStack() as stack, as_rank(session.rank):
                    if action.args["no_sync"]:
                        stack.enter_context(session.unreduced("local"))
                    try:
                        step(session.model, inputs[session.rank])
                    except Trouble:
                        pass
                    else:
                        raise Mismatch("exceptions", "the sharded model did not raise")
        finally:
            CURRENT.trouble = (-1, "")
        session.plain_optim.zero_grad()
        session.optim.zero_grad()
        session.model.zero_grad()
        session.unsynced = False
        if len(raised) < session.num_ranks:
            session.buffers = kept
            raise NotLegal("only some ranks would raise" if raised else "nothing raises there")


# -- gradients -------------------------------------------------------------------------------------------------------


class ZeroGrad(ActionKind):
    kind = "zero_grad"
    weight = 3
    is_basic = True

    def is_legal(self, state: State, case: Case) -> bool:
        return True

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"by": rng.choice(["model", "optimizer"]), "set_to_none": rng.random() < 0.7}

    def run(self, session: Session, action: Action) -> None:
        by_model, set_to_none = action.args["by"] == "model", action.args["set_to_none"]
        if session.case.rows is not None and session.unsynced and not by_model:
            raise NotLegal("as in FSDP2, no parameter of an optimizer shows gradients that are not reduced yet")
        if session.unsynced and not by_model and not set_to_none:
            raise NotLegal("as in FSDP1, .grad shows the unreduced gradient alone; a reduced one before it stays")
        (session.model if by_model else session.optim).zero_grad(set_to_none=set_to_none)
        (session.plain if by_model else session.plain_optim).zero_grad(set_to_none=set_to_none)


class Step(ActionKind):
    kind = "step"
    weight = 6
    is_basic = True

    def run(self, session: Session, action: Action) -> None:
        session.optim.step()
        session.plain_optim.step()


class Clip(ActionKind):
    """Norms are exchanged in fp32, so what they give is compared loosely and taken over."""

    kind = "clip"
    weight = 3

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"norm": rng.choice([1.0, 2.0, 2.0, 3.0, float("inf")]), "max": rng.choice([0.01, 0.1, 10.0])}

    def run(self, session: Session, action: Action) -> None:
        found = session.clip(action.args["max"], action.args["norm"])
        # torch's infinity norm refuses tensors without elements.
        some = [param for param in session.plain.parameters() if param.numel()]
        expected = nn.utils.clip_grad_norm_(some, action.args["max"], action.args["norm"])
        session.compare("norms", found.double(), expected.double(), loose=True)
        grads = {name: p.grad.clone() for name, p in session.plain.named_parameters() if p.grad is not None}
        session.grads_to_plain()
        now = {name: p.grad for name, p in session.plain.named_parameters() if p.grad is not None}
        session.compare("clipped gradients", now, grads, loose=True)
