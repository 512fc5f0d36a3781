"""Tells parameter groups when an optimizer steps, and guards when one steps for the first time."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_flat.comm import Place, Progress
from fsdp_flat.core.events import EVENTS
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.params import is_managed
from fsdp_flat.core.torch_core import dynamo_disabled, dynamo_disabled_here
from fsdp_flat.errors import UsageError, some_of
from fsdp_flat.runtime.offload_optimizer import offload_optimizer
from fsdp_flat.user_warnings import warn_user


class _Steps:
    """Sees the steps of every optimizer in the process.

    Attributes:
        groups: the parameter groups of every unit.
        known: by optimizer that guards know of, the ids of its parameters, and the parameter groups that have some.
        unwrapped: by parameter that a unit showed before ``unwrap`` took it apart, its description if a module has
            another parameter in its place, else an empty string; and the shape of its shard.
    """

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[ParamGroup] = weakref.WeakSet()
        self.known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], weakref.WeakSet[ParamGroup]]]
        self.known = weakref.WeakKeyDictionary()
        self.unwrapped: Any = WeakTensorKeyDictionary()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @dynamo_disabled_here
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        ids = list(map(id, params))
        if optimizer not in self.known or self.known[optimizer][0] != ids:
            if any(map(self._is_of_unit, params)):
                _tell_guards(optimizer)
            held = set(params)
            stepped = [group for group in self.groups if not held.isdisjoint(group.slots.visible_params)]
            self.known[optimizer] = ids, weakref.WeakSet(stepped)
            # torch's CPUOffload has no such field.
            if any(getattr(group.comm.options.cpu_offload, "offload_optimizer", False) for group in stepped):
                offload_optimizer(optimizer)
            if self._forget not in optimizer._optimizer_load_state_dict_post_hooks.values():
                optimizer.register_load_state_dict_post_hook(self._forget)
        groups = self.known[optimizer][1]
        has_closure = any(each is not None for each in (*args[1:], *kwargs.values()))  # the last backward may be in it
        waiting = [] if has_closure else [group for group in groups if group.grads.waiting is not None]
        if waiting:
            _check_reduced(optimizer, waiting)
        for group in groups:
            group.note_update()  # a closure may run a forward in the step, which is then not the current one any more

    @dynamo_disabled_here
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = self.known[optimizer][1] if optimizer in self.known else ()
        for group in groups:
            group.note_step()
        if groups:
            Progress.place = Place(num_steps=Progress.place.num_steps + 1)

    def _is_of_unit(self, param: torch.Tensor) -> bool:
        """Return whether a unit shards, replaces or unshards a parameter, or did before it was unwrapped."""
        return is_managed(param) or hasattr(param, "_fsdp_flat_index") or param in self.unwrapped

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        self.known.pop(optimizer, None)


def _check_reduced(optimizer: torch.optim.Optimizer, waiting: list[ParamGroup]) -> None:
    """Raise a UsageError if ``.grad`` has the unsharded shape; warn if gradients that wait are in no ``.grad``."""
    params = [param for group in waiting for param in group.slots.visible_params]
    names = some_of(list(dict.fromkeys(repr(group.spec.unit_name) for group in waiting)), 3)
    wait = f"{type(optimizer).__name__}.step() was called while gradients of units wait to be reduced ({names})"
    if any(param.grad is not None and param.grad.shape != param.shape for param in params):
        raise UsageError(
            f"{wait}, so they have another size of tensor than this rank's shard. Run the last backward before a step "
            'outside of no_sync, or use no_sync(mode="sharded").'
        )
    if all(param.grad is None for param in params):
        warn_user(
            f"{wait}, so it changes none of their parameters. Call set_requires_gradient_sync(True) before the last "
            "backward of a step."
        )


@functools.cache
def _steps() -> _Steps:
    return _Steps()


@dynamo_disabled
def _tell_guards(optimizer: torch.optim.Optimizer) -> None:
    for guard in EVENTS.before_optimizer:
        guard(optimizer)


def watch_steps_on(group: ParamGroup) -> None:
    """Tell ``group`` of the steps of optimizers that hold its parameters; tell guards again of every optimizer.

    It uses torch's hooks for all optimizers of the process.
    """
    _steps().groups.add(group)
    _steps().known.clear()


def stepped_ids() -> set[int]:
    """Return the ids of the parameters of all optimizers that have stepped."""
    return {each for ids, _ in _steps().known.values() for each in ids}


def note_unwrapped(params: Mapping[torch.Tensor, tuple[str, torch.Size]]) -> None:
    """Record parameters of a unit that was taken apart; tell guards again of every optimizer.

    ``params`` has for each parameter its description, or an empty string if its module still has it, and the shape of
    its shard.
    """
    _steps().unwrapped.update(params)
    _steps().known.clear()


def unwrapped_from(param: torch.Tensor) -> tuple[str, torch.Size] | None:
    """Return what :func:`note_unwrapped` recorded of a parameter; None if no unit that was taken apart had it."""
    found: tuple[str, torch.Size] | None = _steps().unwrapped.get(param)
    return found
