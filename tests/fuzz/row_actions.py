"""Actions on states of ``fully_shard``: state dicts, and other ways to shard."""

from __future__ import annotations

import copy
import random
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from .action_kinds import ActionKind
from .case import Action, Case, nodes_of, options_from, rows_from
from .row_session import RowSession, full
from .rows import fitted
from .session import Mismatch, NotLegal, Session, State


class RowSnapshot(ActionKind):
    """Keep the state dicts of model and optimizer; the replica loads the full values."""

    kind = "row_snapshot"
    fronts = ("fully_shard",)
    weight = 1.5

    def advance(self, state: State, action: Action) -> None:
        state.has_snapshot = True

    def run(self, session: Session, action: Action) -> None:
        assert isinstance(session, RowSession)
        state = session.model.state_dict()
        # A wrapper's full state dict holds full tensors also of units of fully_shard inside.
        shown = {name: state[name] for name in session.params if isinstance(state[name], DTensor)}
        own = {name: session.params[name].to_local().data_ptr() for name in shown}
        if moved := [name for name, value in shown.items() if value.to_local().data_ptr() != own[name]]:
            raise Mismatch("memory of state dicts", f"{moved} are not the parameters' own")
        whole = {name: full(value).clone() for name, value in state.items()}
        with session.replica(session.rank) as plain:
            session.compare("state dicts", whole, dict(plain.state_dict()))
            plain.load_state_dict(whole)
        session.cached = shown
        kept = {name: value.detach().clone() for name, value in state.items()}
        params = {name: p.detach().clone() for name, p in session.plain.named_parameters()}
        optims = copy.deepcopy((session.optim.state_dict(), session.plain_optim.state_dict()))
        session.snapshot = (kept, whole, params, session.copied_buffers(), *optims)
        session.has_snapshot = True


class RowRestore(ActionKind):
    """Load what was kept: as it was, assigned, distributed by hand, or full values of rank 0."""

    kind = "row_restore"
    fronts = ("fully_shard",)
    weight = 5

    def is_legal(self, state: State, case: Case) -> bool:
        return state.is_between_steps and state.has_snapshot

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"form": rng.choice(["sharded", "sharded", "assign", "distributed", "full", "rank 0"])}

    def run(self, session: Session, action: Action) -> None:
        assert isinstance(session, RowSession)
        form = action.args["form"]
        kept, whole, params, buffers, optim, plain_optim = session.snapshot
        model, plain = session.model, session.plain
        if session.has_wrappers and form != "sharded":
            raise NotLegal(f"{form} values for both fronts")
        if form == "assign" and any(node.kind == "tied" for node in nodes_of(session.case.model)):
            raise NotLegal("assigned values of a tied parameter")
        if form == "rank 0" and any(node.refers >= 0 for node in nodes_of(session.case.model)):
            raise NotLegal("torch's broadcast fails, with its own fully_shard too, for modules at two places")
        if form in ("sharded", "assign"):
            model.load_state_dict({name: value.clone() for name, value in kept.items()}, assign=form == "assign")
        elif form == "distributed":
            own = model.state_dict()
            model.load_state_dict({name: distributed(own[name], value) for name, value in whole.items()})
        else:
            is_sender = form == "full" or session.rank == 0
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=form == "rank 0")
            set_model_state_dict(model, copy.deepcopy(whole) if is_sender else {}, options=options)
        if form == "assign":
            session.remember(model)
            session.optim = session.make_optimizer(model)
        session.optim.load_state_dict(copy.deepcopy(optim))
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(params[name])
        persistent = set(plain.state_dict())
        chosen = [buffers[0]] * session.num_ranks if form == "rank 0" else buffers
        for mine, theirs in zip(session.buffers, chosen):
            mine.update({name: buffer.clone() for name, buffer in theirs.items() if name in persistent})
        session.plain_optim.load_state_dict(copy.deepcopy(plain_optim))
        if form == "assign":
            session.plain_optim.zero_grad()
        session.compare_optimizers()


def distributed(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Place a full value as a tensor of its shape is placed."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)


def load_optimizer(session: RowSession, optim: torch.optim.Optimizer, states: dict[str, dict[str, Any]]) -> None:
    """Load full optimizer states, by the names of the parameters."""
    names = {param: name for name, param in session.params.items()}
    ordered = [names[param] for group in optim.param_groups for param in group["params"]]
    state = {
        index: {key: distributed(session.params[name], value) for key, value in states[name].items()}
        for index, name in enumerate(ordered)
        if states[name]
    }
    optim.load_state_dict({**optim.state_dict(), "state": state})


class RowMove(ActionKind):
    """Save, load into a new model that is sharded in another way, and go on with that one."""

    kind = "row_move"
    fronts = ("fully_shard",)
    weight = 2.5

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        from .generate import random_row_options, random_rows

        return {
            "form": rng.choice(["full", "checkpoint"]),
            "options": asdict(random_row_options(rng, case.num_ranks)),
            "rows": asdict(random_rows(rng, case.model, with_wrappers=False)),
            "optimizer": rng.random() < 0.7,
        }

    def advance(self, state: State, action: Action) -> None:
        state.has_snapshot = False  # its values have the placements of before

    def run(self, session: Session, action: Action) -> None:
        assert isinstance(session, RowSession)
        if session.has_wrappers:
            raise NotLegal("a tree of both fronts")
        form, with_optim = action.args["form"], action.args["optimizer"]
        options = options_from(action.args["options"])
        rows = fitted(replace(session.case, rows=rows_from(action.args["rows"])))
        state = session.model.state_dict()
        whole = {name: full(value).clone() for name, value in state.items()}
        directory = f"{session.directory}/dcp{session.num_saves}"
        session.num_saves += 1
        if form == "checkpoint":
            dcp.save({"model": state}, checkpoint_id=directory)
        optim_state = {
            name: {key: full(value).clone() for key, value in session.optim.state.get(param, {}).items()}
            for name, param in session.params.items()
        }
        new, case = session.sharded_by_rows(session.fresh(action.seed), rows, options)
        new_optim = session.make_optimizer(new)
        if form == "checkpoint":
            loaded = {"model": new.state_dict()}
            dcp.load(loaded, checkpoint_id=directory)
            new.load_state_dict(loaded["model"])
            # Buffers are taken to be the same on every rank, so one rank's are saved.
            for name in set(session.buffers[0]) & set(whole):
                for buffers in session.buffers:
                    buffers[name] = loaded["model"][name].clone()
        else:
            own = new.state_dict()
            new.load_state_dict({name: distributed(own[name], value) for name, value in whole.items()})
        if with_optim:
            load_optimizer(session, new_optim, optim_state)
        else:
            session.plain_optim = session.make_optimizer(session.plain)
        transient = {name for name, _ in session.plain.named_buffers()} - set(whole)
        for buffers in session.buffers:
            for name in transient:
                buffers[name] = torch.zeros_like(buffers[name])
        session.adopt(new, new_optim, case)
        session.has_snapshot = False
        session.compare_optimizers()
