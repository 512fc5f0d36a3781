"""The actions of programs: one class each, in a registry."""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType, ShardedEMA, StateDictType, load_checkpoint, save_checkpoint

from .case import Action, Case, nodes_of, options_from, wrapping_from
from .models import CURRENT, Part, Trouble, as_rank
from .session import Mismatch, NotLegal, Session, State, shard_sizes

__all__ = ["ACTIONS", "State"]

ACTIONS: dict[str, ActionKind] = {}


class ActionKind:
    """A kind of action. Subclasses are registered under their ``kind``.

    Attributes:
        kind: its name.
        weight: how often it comes.
        is_basic: every program may have it; others are in some programs only.
    """

    kind: ClassVar[str]
    weight: ClassVar[float] = 1.0
    is_basic: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        ACTIONS[cls.kind] = cls()

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
    """Forwards and backwards inside ``no_sync``."""

    kind = "accumulate"
    weight = 4

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending < 2

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {
            "mode": rng.choice(["local", "local", "sharded"]),
            "uses": [random_uses(rng, case) for _ in range(rng.choice([1, 1, 2]))],
        }

    def advance(self, state: State, action: Action) -> None:
        state.unsynced = state.unsynced or action.args["mode"] == "local"

    def run(self, session: Session, action: Action) -> None:
        mode = action.args["mode"]
        for index, uses in enumerate(action.args["uses"]):
            with session.model.no_sync(mode=mode):
                one = session.forward(action.seed + index)
                session.backward([one], uses, retain=False, synced=False)
            if mode == "local":
                session.unsynced = True
            elif not session.unsynced:
                session.fill_zeros()


class InputGradient(ActionKind):
    """``autograd.grad`` with respect to the input, which leaves gradients of parameters alone."""

    kind = "input_gradient"
    weight = 2

    def is_legal(self, state: State, case: Case) -> bool:
        return state.num_pending < 3 and not is_reentrant(case)

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
        ids = [node.id for node in nodes_of(case.model) if node.kind != "alias"]
        where = rng.choice(["before", "after", "backward", "backward at the end"])
        return {"id": rng.choice(ids), "where": where, "no_sync": rng.random() < 0.2}

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
                        stack.enter_context(session.model.no_sync())
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
        found = session.model.clip_grad_norm_(action.args["max"], action.args["norm"])
        # torch's infinity norm refuses tensors without elements.
        some = [param for param in session.plain.parameters() if param.numel()]
        expected = nn.utils.clip_grad_norm_(some, action.args["max"], action.args["norm"])
        session.compare("norms", found.double(), expected.double(), loose=True)
        grads = {name: p.grad.clone() for name, p in session.plain.named_parameters() if p.grad is not None}
        session.grads_to_plain()
        now = {name: p.grad for name, p in session.plain.named_parameters() if p.grad is not None}
        session.compare("clipped gradients", now, grads, loose=True)


# -- parameters ------------------------------------------------------------------------------------------------------


class Look(ActionKind):
    """Read whole parameters and gradients; also while graphs wait."""

    kind = "look"
    weight = 1

    def is_legal(self, state: State, case: Case) -> bool:
        return not state.unsynced

    def run(self, session: Session, action: Action) -> None:
        session.compare_all()


class Write(ActionKind):
    """Change whole parameters inside ``summon_full_params``."""

    kind = "write"
    weight = 2

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"how": rng.choice(["in place", "data", "gradients"]), "share": rng.choice([0.3, 1.0])}

    def run(self, session: Session, action: Action) -> None:
        how, share = action.args["how"], action.args["share"]

        def change(model: nn.Module) -> None:
            rng = random.Random(action.seed)
            for _, param in model.named_parameters():
                if rng.random() > share or not param.is_floating_point():
                    continue
                if how == "gradients":
                    if param.grad is not None:
                        param.grad.mul_(0.5)
                elif how == "data":
                    param.data.mul_(0.9)
                else:
                    param.mul_(0.9).add_(0.01)

        with torch.no_grad():
            with FSDP.summon_full_params(session.model, with_grads=how == "gradients"):
                change(session.model)
            change(session.plain)


class Toggle(ActionKind):
    """Freeze or free parameters between steps: any with original parameters, else those of a unit and below."""

    kind = "toggle"
    weight = 2

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"index": rng.randrange(100), "on": rng.random() < 0.4}

    def run(self, session: Session, action: Action) -> None:
        for optim in (session.optim, session.plain_optim):
            optim.zero_grad()
        index, on = action.args["index"], action.args["on"]
        if session.case.options.use_orig_params:
            names = [name for name, p in session.plain.named_parameters() if p.is_floating_point()]
            chosen = {name for place, name in enumerate(names) if place % 3 == index % 3}
            from fsdp_flat import clean_named_parameters

            for found in (clean_named_parameters(session.model), session.plain.named_parameters()):
                for name, param in found:
                    if name in chosen:
                        param.requires_grad_(on)
            return
        units = [unit for unit in FSDP.fsdp_modules(session.model) if unit._flat_param is not None]
        if not units:
            raise NotLegal("no unit")
        place = index % len(units)
        units[place]._flat_param.requires_grad_(on)
        for param in session.groups[place]:
            param.requires_grad_(on)


class Convert(ActionKind):
    """To fp32 and back, which rounds parameters."""

    kind = "convert"
    weight = 1

    def run(self, session: Session, action: Action) -> None:
        if any(param.dtype is torch.float32 for param in session.plain_optim.state):
            raise NotLegal("torch's optimizers keep states in the former dtype")
        for model in (session.model, session.plain):
            model.float()
        for buffers in session.buffers:
            for name, buffer in buffers.items():
                if buffer.is_floating_point():
                    buffers[name] = buffer.float().double()
        session.model.double()
        session.plain.double()


class Average(ActionKind):
    """``ShardedEMA``: made, updated, and swapped in."""

    kind = "average"
    weight = 2

    def run(self, session: Session, action: Action) -> None:
        decay = 0.7
        if session.ema is None:
            shadows = {name: p.detach().clone() for name, p in session.plain.named_parameters()}
            session.ema = (ShardedEMA(session.model, decay), shadows)
        ema, shadows = session.ema
        ema.update()
        for name, param in session.plain.named_parameters():
            if param.is_floating_point():
                shadows[name].lerp_(param.detach(), 1 - decay)
        with ema.swap(), FSDP.summon_full_params(session.model, writeback=False):
            found = {name: p.detach().clone() for name, p in session.model.named_parameters()}
        session.compare("averages", found, shadows)


# -- states ----------------------------------------------------------------------------------------------------------


class Snapshot(ActionKind):
    """Keep a full state dict of model and optimizer."""

    kind = "snapshot"
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
    return [handle.layout.numel for unit in units for handle in unit.handles]


class Move(ActionKind):
    """Save, load into a new model of another wrapping, and go on with that one."""

    kind = "move"
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


class Copy(ActionKind):
    """``copy.deepcopy`` of model and optimizer; go on with the copy, or with the original after a step of it."""

    kind = "copy"
    weight = 1.5

    def arguments(self, rng: random.Random, case: Case) -> dict[str, Any]:
        return {"adopt": rng.random() < 0.6}

    def run(self, session: Session, action: Action) -> None:
        model, optim = copy.deepcopy((session.model, session.optim))
        plain, plain_optim = copy.deepcopy((session.plain, session.plain_optim))
        if action.args["adopt"]:
            session.has_hooks = False
            session.plain, session.plain_optim = plain, plain_optim
            session.buffers = session.copied_buffers()
            session.adopt(model, optim, session.case)
            return
        # What the copy does must not change the original.
        with torch.no_grad():
            for param in model.parameters():
                if param.is_floating_point():
                    param.add_(1.0)
        with as_rank(session.rank):
            out = model(session.batch(action.seed, session.rank))["out"]
        if out.requires_grad:
            out.mean().backward()
            optim.step()


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
            unit
            for unit in FSDP.fsdp_modules(session.model)
            if isinstance(unit.module, Part) and unit is not session.model and not is_shared(session.case, unit.module)
        ]
        if not units:
            raise NotLegal("no unit")
        unit = units[action.args["index"] % len(units)]
        other = next(m for m in session.plain.modules() if getattr(m, "node_id", -1) == unit.module.node_id)
        inputs = session.batches(action.seed)
        kept = session.copied_buffers()
        losses = []
        for rank, x in enumerate(inputs):
            with session.replica(rank):
                losses.append(other(x).tanh().square().mean())
        if not all(loss.requires_grad for loss in losses):
            session.buffers = kept
            raise NotLegal("a loss without a gradient")
        for rank, loss in enumerate(losses):
            with session.replica(rank):
                (loss / session.num_ranks).backward()
        session.fill_zeros()
        with as_rank(session.rank):
            loss = unit(inputs[session.rank]).tanh().square().mean()
            loss.backward()
        session.compare("losses", loss.detach(), losses[session.rank].detach())


def close_session(session: Session) -> None:
    """Compare at the end of a program."""
    session.drop_pending()
    if not session.unsynced:
        session.compare_all()
    session.compare_optimizers()
