"""Checks each optimizer before its first step on the parameters of a unit, and tells handles of each step."""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_flat.core.flat_parameter import FlatParameter
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.params import is_managed, owner_of, unsharded_shape
from fsdp_flat.core.torch_core import dynamo_disabled, dynamo_disabled_here
from fsdp_flat.errors import LocalShardError, UsageError, counted
from fsdp_flat.user_warnings import warn_user

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop)
# Lower-case parts of class names of optimizers whose update of an element depends on the rest of the parameter.
_WHOLE_PARAMETERS = ("adafactor", "muon", "shampoo", "soap")
# Class names of optimizers whose update of an element depends on the norm of the parameter or of its gradient.
_PARAMETER_NORMS = re.compile(
    r"(fused|mixedprecision|cpu|nv|onebit|zeroone|paged|pytorch|torch)*"
    r"(lamb|lars|larc|novograd|adamp|sgdp)(w|sgd|v\d|8bit|32bit|optimizer)*"
)
# Like _WHOLE_PARAMETERS, of optimizers whose update of an element depends on all parameters.
_ALL_PARAMETERS = ("lbfgs",)


class _Watch:
    """Checks an optimizer before its first step, and again after it has got other parameters or loaded a state dict.

    Attributes:
        handles: the handles of every unit.
        checked: by optimizer that was checked, the ids of its parameters, and their handles.
        unwrapped: by parameter that an optimizer of an unwrapped model holds, its description and its shape as a shard.
    """

    def __init__(self) -> None:
        self.handles: weakref.WeakSet[ParamGroup] = weakref.WeakSet()
        self.checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], weakref.WeakSet[ParamGroup]]]
        self.checked = weakref.WeakKeyDictionary()
        self.unwrapped: Any = WeakTensorKeyDictionary()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @dynamo_disabled_here
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        ids = [each for group in optimizer.param_groups for each in map(id, group["params"])]
        ids_checked, found = self.checked.get(optimizer, (None, self.handles))
        if ids != ids_checked:
            _check_optimizer(optimizer)
            held = {param for group in optimizer.param_groups for param in group["params"]}
            found = weakref.WeakSet(
                handle for handle in self.handles if not held.isdisjoint(handle.shown.visible_params)
            )
            self.checked[optimizer] = ids, found
            if self._forget not in optimizer._optimizer_load_state_dict_post_hooks.values():
                optimizer.register_load_state_dict_post_hook(self._forget)
        for handle in found:
            handle.note_update()  # a closure may run a forward in the step, which is then not the current one any more

    @dynamo_disabled_here
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for handle in self.checked[optimizer][1] if optimizer in self.checked else ():
            handle.note_step()

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        self.checked.pop(optimizer, None)


@functools.cache
def _watch() -> _Watch:
    return _Watch()


def watch_steps_on(handle: ParamGroup) -> None:
    """Check each optimizer before its next step, and tell ``handle`` of the steps of those that hold its parameters.

    It uses torch's hook for all optimizers of the process.
    """
    _watch().handles.add(handle)
    _watch().checked.clear()


def note_unwrapped(params: Mapping[torch.Tensor, tuple[str, torch.Size]]) -> None:
    """Check each optimizer before its next step for parameters of a unit that was taken apart.

    ``params`` has the description of each parameter that an optimizer held, and its shape as a shard.
    """
    _watch().unwrapped.update(params)
    _watch().checked.clear()


def _check_unwrapped(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    """Raise a UsageError if a parameter is none of the unwrapped model any more, or has states of a shard."""
    told, shape = _watch().unwrapped.get(param, ("", None))
    states = optimizer.state.get(param, {}).items()
    if told:
        problem = f"holds {told}, which unwrap has replaced by ordinary parameters, so its steps change nothing"
    elif shape is None or shape == param.shape:
        return
    elif stale := [name for name, state in states if isinstance(state, torch.Tensor) and state.shape == shape]:
        problem = (
            f"has a state {stale[0]!r} of shape {tuple(shape)}, that of a local shard, of a parameter that unwrap has "
            f"made full, with shape {tuple(param.shape)}"
        )
    else:
        return
    raise UsageError(
        f"{type(optimizer).__name__} {problem}. Build an optimizer from the parameters of the model that unwrap "
        "returned. To go on with its states, take state = FSDP.optim_state_dict(model, optimizer) as a FULL_STATE_DICT "
        "before unwrap(model), and load FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain_model) "
        "into the new optimizer."
    )


@dynamo_disabled
def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise a UsageError if an optimizer holds replaced parameters, needs unsharded ones, or has states of those.

    An optimizer that supports local shards declares it by ``optimizer.works_on_slices = True``, or is a class with
    "Distributed" in its name. One that keeps the full states of each parameter on one rank names these ranks in
    ``state_owners``.
    """
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    needs_whole, needs_all = (
        any(part in kind for kind in kinds for part in parts) for parts in (_WHOLE_PARAMETERS, _ALL_PARAMETERS)
    )
    needs_norms = any(_PARAMETER_NORMS.fullmatch(kind.replace("_", "")) for kind in kinds)
    # One that says so in its name knows shards of its own: its class cannot show whether these.
    works_on_slices = getattr(optimizer, "works_on_slices", any("distributed" in kind for kind in kinds))
    owners = getattr(optimizer, "state_owners", {})
    for group in optimizer.param_groups:
        for param in group["params"]:
            owner = owner_of(param)
            _check_unwrapped(optimizer, param)
            if hasattr(param, "_fsdp_flat_index"):
                raise UsageError(
                    f"{type(optimizer).__name__} holds an unsharded parameter of shape {tuple(param.shape)}, which "
                    "gets no gradients: it was built after a forward without a backward. Build it from "
                    "model.parameters() before the first forward, or call reshard() of the modules before."
                )
            if param in owners or not is_managed(param):
                continue
            if owner is not None and owner.is_replaced:
                raise UsageError(
                    f"{type(optimizer).__name__} holds {owner.describe()}, which wrapping replaced by a flat parameter "
                    "or by a local shard, so its steps change nothing. Build the optimizer after wrapping or "
                    "fully_shard, from model.parameters(); parameters that are plain tensors stay the same objects "
                    "with use_orig_params=True."
                )
            if not works_on_slices and (needs_whole or (needs_norms and not _has_all_elements(param))):
                check_whole(type(optimizer).__name__, param)
            if needs_all and not works_on_slices:
                _check_all_here(optimizer, param)
            for name, state in optimizer.state.get(param, {}).items():
                if isinstance(state, torch.Tensor) and state.dim() > 0 and state.shape != param.shape:
                    _check_state(optimizer, param, name, state)
    _check_groups(optimizer)


def _check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Warn of an empty group: rules by ``param.dim()`` match nothing on 1-D local shards."""
    if all(group["params"] for group in optimizer.param_groups):
        return
    parts = [shape for group in optimizer.param_groups for param in group["params"] for shape in _shapes_of_part(param)]
    if len({len(shape) > 1 for shape in parts}) > 1:
        warn_user(
            f"A parameter group of {type(optimizer).__name__} is empty, and the others hold weights and biases "
            "alike. Rules by param.dim() or param.shape find nothing on sharded parameters, which are 1-D parts: "
            "use names, or fsdp_flat.whole_shape(param), which needs use_orig_params=True."
        )


def _shapes_of_part(param: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the unsharded shapes of the parameters in a 1-D local shard; empty for any other parameter."""
    if isinstance(param, FlatParameter):
        return [tuple(shape) for shape in param._shapes]  # type: ignore[attr-defined]
    whole = unsharded_shape(param)
    return [] if whole is None or param.dim() > 1 else [tuple(whole)]


def check_whole(kind: str, param: torch.Tensor) -> None:
    """Raise a LocalShardError if an optimizer of class ``kind`` needs full parameters and was given a local shard."""
    if not is_managed(param) or param.shape == unsharded_shape(param):
        return
    raise LocalShardError(
        f"{kind} computes with full parameters, and it was given {_described(param)}. On local shards {kind} would be "
        f"another algorithm. Use fsdp_flat.MatrixOptimizer(model, {kind}, ...), which needs use_orig_params=True and "
        "makes each parameter full on one rank for the step; or give it parameters that no unit shards "
        "(ignored_states, or NO_SHARD with use_orig_params=True), use an optimizer that works element by element, or "
        "set optimizer.works_on_slices = True if this one takes local shards into account."
    )


def _has_all_elements(param: torch.Tensor) -> bool:
    """Return whether a parameter holds the elements of one unsharded parameter, whatever its shape."""
    shapes = param._shapes if isinstance(param, FlatParameter) else [unsharded_shape(param)]  # type: ignore[attr-defined]
    return len(shapes) == 1 and shapes[0] is not None and param.numel() >= math.prod(shapes[0])


def _check_all_here(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    if isinstance(param, FlatParameter):
        is_here = param.numel() >= sum(math.prod(shape) for shape in param._shapes)  # type: ignore[attr-defined]
    else:
        is_here = param.shape == unsharded_shape(param)
    if is_here:
        return
    kind = type(optimizer).__name__
    raise UsageError(
        f"{kind} computes dot products over all parameters, and it was given {_described(param)}. On local shards "
        f"{kind} would be another algorithm, also as a MatrixOptimizer, which updates each parameter on one rank. Use "
        "NO_SHARD; or fully_shard, whose DTensors it takes if the number of ranks divides the first dim of each; or "
        "set optimizer.works_on_slices = True if this one sums its dot products over ranks."
    )


def _check_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str, state: torch.Tensor) -> None:
    if state.shape == unsharded_shape(param) or isinstance(optimizer, _ELEMENTWISE):
        raise UsageError(
            f"{type(optimizer).__name__} has a state {name!r} of shape {tuple(state.shape)} for {_described(param)}: "
            "it is from before wrapping, or was loaded as it is from an optimizer of the unwrapped model. Build the "
            "optimizer after wrapping, and load states by FSDP.optim_state_dict_to_load(model, optimizer, state_dict), "
            "keyed by names (FSDP.rekey_optim_state_dict)."
        )


def _described(param: torch.Tensor) -> str:
    if isinstance(param, FlatParameter):
        return f"a flat parameter, of which this rank holds {counted(param.numel(), 'elements')}"
    owner = owner_of(param)
    name = "a parameter" if owner is None else owner.describe()
    return f"{name}, of which this rank holds {counted(param.numel(), 'elements')} in one dimension"
