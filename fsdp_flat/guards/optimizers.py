"""Refuses an optimizer that would compute something else on shards, or on parameters that no module has any more."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop

from fsdp_flat.core import FlatParameter, Guard, is_managed, owner_of, unsharded_shape
from fsdp_flat.errors import LocalShardError, UnsupportedError, UsageError, counted
from fsdp_flat.runtime import unwrapped_from
from fsdp_flat.user_warnings import warn_user

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop)
# What the update of an element depends on besides itself: the rest of its parameter in its shape, the norm of its
# parameter or of the gradient of that, or all parameters.
_SHAPE, _NORM, _ALL = "shape", "norm", "all"
# Known optimizers that are not elementwise, by the exact name of their class or of a base class of it.
_DEPENDS_ON = {
    **dict.fromkeys(("Adafactor", "Muon", "SOAP", "Shampoo"), _SHAPE),
    **dict.fromkeys(("LAMB", "Lamb", "FusedLAMB", "FusedLamb", "LAMB8bit", "LARS", "Lars", "LARS8bit"), _NORM),
    **dict.fromkeys(("NovoGrad", "FusedNovoGrad", "NvNovoGrad", "AdamP", "SGDP"), _NORM),
    "LBFGS": _ALL,
}
# The base class of all optimizers of bitsandbytes, those with states in 32 bits too.
_BITSANDBYTES = "Optimizer8bit"


class Optimizers(Guard):
    """Checks each optimizer of a unit's parameters before its first step, and after it has got others or states."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise a UsageError if an optimizer holds replaced parameters, needs unsharded ones, or has states of those.

        An optimizer of a known class that supports local shards declares it by ``optimizer.works_on_slices = True``.
        One that keeps the full states of each parameter on one rank names these ranks in ``state_owners``.
        """
        needs = {_DEPENDS_ON.get(kind.__name__) for kind in type(optimizer).__mro__}
        if getattr(optimizer, "works_on_slices", False):
            needs = set()
        owners = getattr(optimizer, "state_owners", {})
        takes_dtensors = all(kind.__name__ != _BITSANDBYTES for kind in type(optimizer).__mro__)
        for group in optimizer.param_groups:
            for param in group["params"]:
                _check_replaced(optimizer, param)
                if isinstance(param, DTensor) and not takes_dtensors:
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} of bitsandbytes takes no DTensors, which fully_shard makes of "
                        "parameters. Use the optimizer of this name in torchao.optim, or FullyShardedDataParallel with "
                        "use_orig_params=True."
                    )
                if param not in owners and is_managed(param):
                    _check_shard(optimizer, param, needs)
        _warn_of_empty_groups(optimizer)


def _check_unwrapped(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    """Raise a UsageError if a parameter is none of the unwrapped model any more, or has states of a shard."""
    told, shape = unwrapped_from(param) or ("", None)
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


def _check_replaced(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    """Raise a UsageError if a step on a parameter would change nothing: a module has another one in its place."""
    _check_unwrapped(optimizer, param)
    if hasattr(param, "_fsdp_flat_index"):
        raise UsageError(
            f"{type(optimizer).__name__} holds an unsharded parameter of shape {tuple(param.shape)}, which "
            "gets no gradients: it was built after a forward without a backward, or inside summon_full_params. Build "
            "it from model.parameters() before the first forward and outside of such a block, or call reshard() of the "
            "modules before."
        )


def _check_shard(optimizer: torch.optim.Optimizer, param: torch.Tensor, needs: Collection[str | None]) -> None:
    """Raise a UsageError if a parameter is replaced, is a shard and is needed whole, or has states of another shape."""
    owner = owner_of(param)
    if owner is not None and owner.is_replaced:
        raise UsageError(
            f"{type(optimizer).__name__} holds {owner.describe()}, which wrapping replaced by a flat parameter "
            "or by a local shard, so its steps change nothing. Build the optimizer after wrapping or "
            "fully_shard, from model.parameters(); parameters that are plain tensors stay the same objects "
            "with use_orig_params=True."
        )
    if _SHAPE in needs or (_NORM in needs and not _has_all_elements(param)):
        check_whole(type(optimizer).__name__, param)
    if _ALL in needs:
        _check_all_here(optimizer, param)
    for name, state in optimizer.state.get(param, {}).items():
        if isinstance(state, torch.Tensor) and state.dim() > 0 and state.shape != param.shape:
            _check_state(optimizer, param, name, state)


def _warn_of_empty_groups(optimizer: torch.optim.Optimizer) -> None:
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
