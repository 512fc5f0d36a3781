"""Actions on states of the wrapper: state dicts, checkpoints, copies, other wrappings and numbers of ranks."""

from __future__ import annotations

import copy
import random
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType, StateDictType, load_checkpoint, save_checkpoint

from .action_kinds import ActionKind
from .case import Action, Case, nodes_of, options_from, wrapping_from
from .session import NotLegal, Session, State, shard_sizes

# -- states ----------------------------------------------------------------------------------------------------------


class Snapshot(ActionKind):
    """Keep a full state dict of model and optimizer."""

    kind = "snapshot"
    fronts = ("wrapper",)
    weight = 1.5

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"rekey": rng.random() < 0.3}

    def advance(self, state: State, action: Action) -> None:
        state.has_snapshot = True

    def run(self, session: Session, action: Action) -> None:
        model, plain = session.model, session.plain
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with session.replica(session.rank):
            session.compare("state dicts", state, dict(plain.state_dict()))
        optim = copy.deepcopy(FSDP.optim_state_dict(model, session.optim))
        if action.args["rekey"]:
            by_id = FSDP.rekey_optim_state_dict(optim, OptimStateKeyType.PARAM_ID, plain)
            optim = FSDP.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_NAME, plain)
        params = {name: p.detach().clone() for name, p in plain.named_parameters()}
        buffers = session.copied_buffers()
        session.snapshot = (state, optim, params, buffers, copy.deepcopy(session.plain_optim.state_dict()))
        session.has_snapshot = True


class Restore(ActionKind):
    """Load what was kept."""

    kind = "restore"
    fronts = ("wrapper",)
    weight = 5

    def is_legal(self, state: State, case: Case) -> bool:
        return state.is_between_steps and state.has_snapshot

    def run(self, session: Session, action: Action) -> None:
        state, optim, params, buffers, plain_optim = session.snapshot
        if not session.case.options.use_orig_params and not is_uniform(session):
            raise NotLegal("one flat parameter cannot have several states")
        session.model.load_state_dict(state)
        loadable = FSDP.optim_state_dict_to_load(session.model, session.optim, copy.deepcopy(optim))
        session.optim.load_state_dict(loadable)
        with torch.no_grad():
            for name, param in session.plain.named_parameters():
                param.copy_(params[name])
        persistent = set(session.plain.state_dict())
        for mine, kept in zip(session.buffers, buffers):
            mine.update({name: buffer.clone() for name, buffer in kept.items() if name in persistent})
        session.plain_optim.load_state_dict(copy.deepcopy(plain_optim))
        session.compare_optimizers()


def is_uniform(session: Session) -> bool:
    """Whether parameters that share a flat parameter, in whichever wrapping, have optimizer states alike."""
    states = session.plain_optimizer_state()
    trainable = [name for name, p in session.plain.named_parameters() if p.requires_grad]
    steps = {float(state.get("step", 0)) for state in states.values()}
    return not states or (set(states) == set(trainable) and len(steps) == 1)


def flat_sizes(model: FSDP) -> list[int]:
    """The numbers of elements of the flat parameters, which a LOCAL state dict depends on."""
    units = [module._unit for module in FSDP.fsdp_modules(model)]
    return [handle.layout.numel for unit in units for handle in unit.param_groups]


class Move(ActionKind):
    """Save, load into a new model of another wrapping, and go on with that one."""

    kind = "move"
    fronts = ("wrapper",)
    weight = 2.5

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        from .generate import random_options, random_wrapping

        options = random_options(rng, case.num_ranks)
        return {
            "form": rng.choice(["FULL", "FULL", "SHARDED", "SHARDED", "LOCAL", "checkpoint"]),
            "options": asdict(options),
            "wrapping": asdict(random_wrapping(rng, case.model, options)),
            "optimizer": rng.random() < 0.7,
        }

    def run(self, session: Session, action: Action) -> None:
        form, with_optim = action.args["form"], action.args["optimizer"]
        options, wrapping = options_from(action.args["options"]), wrapping_from(action.args["wrapping"])
        if form == "LOCAL" and (
            session.case.options.mesh or any(n.kind == "tied" for n in nodes_of(session.case.model))
        ):
            # LOCAL is refused with a mesh, and does not load yet where units made by a policy share a weight.
            form = "SHARDED"
        if form == "LOCAL":
            options, wrapping = session.case.options, session.case.wrapping
        elif session.case.optimizer.num_groups == 2 or (with_optim and not is_uniform(session)):
            options = options_from({**asdict(options), "use_orig_params": True})
        # New weights that differ over ranks would be warned about, so they are the same.
        new, case = session.wrapped(lambda: session.fresh(action.seed), wrapping, options)
        new_optim = session.make_optimizer(new)
        if form == "LOCAL" and flat_sizes(new) != flat_sizes(session.model):
            # Freezing after wrapping leaves flat parameters as they are; freezing before divides them.
            form = "SHARDED"
        if form == "SHARDED" and (len(shard_sizes(case)) > 1 or shard_sizes(case) != shard_sizes(session.case)):
            # Chunks of another number of ranks are refused.
            form = "FULL"
        if form == "checkpoint":
            self.by_checkpoint(session, new, new_optim if with_optim else None)
        else:
            self.by_state_dict(session, form, new, new_optim if with_optim else None)
        if not with_optim:
            session.plain_optim = session.make_optimizer(session.plain)
        transient = {name for name, _ in session.plain.named_buffers()} - set(session.plain.state_dict())
        for buffers in session.buffers:
            for name in transient:
                buffers[name] = torch.zeros_like(buffers[name])
        session.adopt(new, new_optim, case)
        session.compare_optimizers()

    def by_state_dict(self, session: Session, form: str, new: FSDP, optim: torch.optim.Optimizer | None) -> None:
        kind = StateDictType[f"{form}_STATE_DICT"]
        with FSDP.state_dict_type(session.model, kind):
            state = session.model.state_dict()
        with FSDP.state_dict_type(new, kind):
            new.load_state_dict(state)
        if optim is None:
            return
        if form == "LOCAL":
            kind = StateDictType.SHARDED_STATE_DICT
        with FSDP.state_dict_type(session.model, kind):
            optim_state = FSDP.optim_state_dict(session.model, session.optim)
        with FSDP.state_dict_type(new, kind):
            # Optimizers without state are warned about.
            if not optim_state["state"]:
                return
            optim.load_state_dict(FSDP.optim_state_dict_to_load(new, optim, optim_state))

    def by_checkpoint(self, session: Session, new: FSDP, optim: torch.optim.Optimizer | None) -> None:
        directory = f"{session.directory}/checkpoint{session.num_saves}"
        session.num_saves += 1
        save_checkpoint(directory, session.model, session.optim, {"rank": session.rank}).wait()
        loaded = load_checkpoint(directory, new, optim)
        assert loaded is not None
        session.compare("extra", loaded.extra, {"rank": session.rank})
        # Buffers are taken to be the same on every rank, so the first rank's are saved.
        for buffers in session.buffers[1:]:
            for name in buffers:
                buffers[name] = session.buffers[0][name].clone()


class Elsewhere(ActionKind):
    """Load a full state dict or a checkpoint into a model of fewer ranks, and run it."""

    kind = "elsewhere"
    fronts = ("wrapper",)
    weight = 1

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        from .generate import random_options, random_wrapping

        options = random_options(rng, case.num_ranks)
        raw = asdict(options)
        raw["mesh"] = ()
        if "HYBRID" in options.strategy:
            raw["strategy"] = "FULL_SHARD"
        return {
            "form": rng.choice(["FULL", "FULL", "checkpoint"]),
            "options": raw,
            "wrapping": asdict(random_wrapping(rng, case.model, options)),
        }

    def run(self, session: Session, action: Action) -> None:
        options, wrapping = options_from(action.args["options"]), wrapping_from(action.args["wrapping"])
        ranks = list(range(session.num_ranks - 1))
        group = dist.new_group(ranks)
        directory = f"{session.directory}/checkpoint{session.num_saves}"
        session.num_saves += 1
        if action.args["form"] == "checkpoint":
            save_checkpoint(directory, session.model).wait()
        else:
            state = session.model.state_dict()
        if session.rank not in ranks:
            return
        new, _ = session.wrapped(lambda: session.fresh(action.seed), wrapping, options, group)
        if action.args["form"] == "checkpoint":
            load_checkpoint(directory, new)
        else:
            new.load_state_dict(state)
        with FSDP.summon_full_params(new, writeback=False):
            found = {name: p.detach().clone() for name, p in new.named_parameters()}
        session.compare("parameters elsewhere", found, {n: p.detach() for n, p in session.plain.named_parameters()})
