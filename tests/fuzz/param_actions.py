"""Actions that read or change parameters between steps, and that call single units."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedEMA, clean_named_parameters

from .action_kinds import ActionKind
from .case import Action, Case
from .session import NotLegal, Session, State

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
    """Change parameters in place: whole ones inside ``summon_full_params``, or DTensors."""

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
            with session.writable(with_grads=how == "gradients"):
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
            session.show_sharded()
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
        session.converted()


class Average(ActionKind):
    """``ShardedEMA``: made, updated, and swapped in."""

    kind = "average"
    fronts = ("wrapper",)
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
