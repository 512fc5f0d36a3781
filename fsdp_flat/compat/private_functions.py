"""Implements private functions of torch's FSDP1 for our wrapper: those that ``private_names.WORKS`` lists.

Each has the name, the arguments and the result of torch's function. Our wrapper is both the FSDP state and the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from fsdp_flat.compat.semi_private import FlatParamHandle, wrappers_in
from fsdp_flat.compat.views import View
from fsdp_flat.core import UnitForward, unit_of, units_of
from fsdp_flat.errors import UsageError
from fsdp_flat.runtime import summon_full_params
from fsdp_flat.state import save_full_or_sharded

# -- whose objects ----------------------------------------------------------------------------------------------------


class _Joined(type):
    """Makes instances of several classes instances of one."""

    joined: tuple[Any, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        joined = cls.__dict__.get("joined")
        return super().__instancecheck__(instance) if joined is None else isinstance(instance, joined)

    def __subclasscheck__(cls, subclass: type) -> bool:
        joined = cls.__dict__.get("joined")
        return super().__subclasscheck__(subclass) if joined is None else issubclass(subclass, joined)


def joined(theirs: type, ours: Sequence[type]) -> type:
    """Create a class for torch's name: a subclass of torch's class, of which its instances and ours are instances."""
    kept = {"joined": (theirs, *ours), "__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
    return _Joined(theirs.__name__, (theirs,), kept)


def holds_ours(value: Any) -> bool:
    """Return whether an argument is one of our objects, or holds some: a module, a list, a record."""
    if isinstance(value, nn.Module):
        return bool(units_of(value))
    if isinstance(value, (View, FlatParamHandle)):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_ours, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(holds_ours, value))
    if is_dataclass(value) and not isinstance(value, type):
        return any(holds_ours(getattr(value, each.name)) for each in fields(value))
    return False


def either(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours if an argument holds an object of ours, else torch's."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = ours if any(map(holds_ours, (*args, *kwargs.values()))) else theirs
        return chosen(*args, **kwargs)

    return call


def refusal(name: str, advice: str) -> Callable[..., Any]:
    """Return a function that raises a UsageError in the place of one of torch's that cannot work on our objects."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise UsageError(
            f"{name} is a private function of torch's FSDP, and was called on a model that fsdp_flat has sharded, "
            f"which has no such step. {advice}."
        )

    return refuse


def _wrapper(state: Any, name: str) -> Any:
    unit = unit_of(state) if isinstance(state, nn.Module) else None
    if unit is not None and unit.options.api.has_wrapper:
        return state
    raise UsageError(
        f"{name} takes a FullyShardedDataParallel, as FSDP1's state of a module; got {type(state).__name__}. Pass the "
        "wrapper. For a module of fully_shard call its own methods: unshard, reshard, reset_iter_state."
    )


# -- look-ups ---------------------------------------------------------------------------------------------------------


def _get_fsdp_root_states(module: nn.Module) -> list[Any]:
    return [wrapper for wrapper in wrappers_in(module) if wrapper.check_is_root()]


def _get_fsdp_root_states_with_modules(module: nn.Module) -> tuple[list[Any], list[Any]]:
    return _get_fsdp_root_states(module), _get_fsdp_root_states(module)


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    return [handle for wrapper in wrappers_in(module) for handle in wrapper._named_handles()]


def _is_fsdp_root(state: Any, module: nn.Module) -> bool:
    return bool(_wrapper(state, "_is_fsdp_root").check_is_root())


# -- a forward, step by step ------------------------------------------------------------------------------------------


def _lazy_init(state: Any, root_module: nn.Module) -> Any:
    _wrapper(state, "_lazy_init").check_is_root()
    return state


def _root_pre_forward(state: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Do the set-up of a first forward. Inputs are moved and cast by :func:`_pre_forward`."""
    _wrapper(state, "_root_pre_forward").check_is_root()
    return args, kwargs


def _pre_forward(
    state: Any,
    handle: FlatParamHandle | None,
    unshard_fn: Callable[..., Any] | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Begin a forward of the wrapper's unit, which unshards it; :func:`_post_forward` ends it."""
    wrapper = _wrapper(state, "_pre_forward")
    forward = UnitForward(wrapper, wrapper._unit)
    try:
        entered = forward.enter(tuple(args), dict(kwargs))
        if unshard_fn is not None:
            unshard_fn(state, handle)
    except BaseException as error:
        forward.fail(error)
        raise
    wrapper.__dict__.setdefault("_open_forwards", []).append(forward)
    return entered


def _pre_forward_unshard(state: Any, handle: FlatParamHandle | None) -> None:
    if handle is not None:
        handle.unshard()


def _post_forward(
    state: Any,
    handle: FlatParamHandle | None,
    reshard_fn: Callable[..., Any] | None,
    module: nn.Module,
    input: Any,
    output: Any,
) -> Any:
    """End the forward that :func:`_pre_forward` began, and return the outputs, by which a backward reaches the unit."""
    wrapper = _wrapper(state, "_post_forward")
    opened = wrapper.__dict__.get("_open_forwards")
    if not opened:
        raise UsageError(
            f"_post_forward was called on unit {wrapper._unit.name!r} without _pre_forward before it. Call "
            "_pre_forward first; or fsdp_flat.register_forward_method for a method, fsdp_flat.unshard_for for a block."
        )
    forward = opened.pop()
    try:
        output = forward.leave(output)
    except BaseException as error:
        forward.fail(error)
        raise
    if reshard_fn is None:
        wrapper._unit.unshard()  # the caller wants the parameters to stay unsharded
    elif getattr(reshard_fn, "__name__", "") != "_post_forward_reshard":
        reshard_fn(state, handle)  # else the end of the forward has decided
    return output


def _post_forward_reshard(state: Any, handle: FlatParamHandle | None) -> None:
    wrapper = _wrapper(state, "_post_forward_reshard")
    if handle is not None and wrapper._unit.control.reshard_after_forward is None and not wrapper.check_is_root():
        handle.reshard(True)


def _unshard(state: Any, handle: FlatParamHandle | None, unshard_stream: Any, pre_unshard_stream: Any) -> None:
    """Unshard the unit, in the order of the current stream; the library has streams of its own."""
    if handle is not None:
        handle.unshard()


def _reshard(state: Any, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
    handle.reshard(free_unsharded_flat_param)


def _post_backward_final_callback(state: Any, module: nn.Module) -> None:
    # Clients call it to clean up after a step that raised.
    wrapper = _wrapper(state, "_post_backward_final_callback")
    wrapper.__dict__.pop("_open_forwards", None)
    wrapper.reset_iter_state()


# -- full parameters, and optimizer states ----------------------------------------------------------------------------


def _unshard_params_for_summon(
    module: nn.Module, state: Any, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> AbstractContextManager[Any]:
    return summon_full_params(module, False, writeback, rank0_only, offload_to_cpu, with_grads)


_unshard_fsdp_state_params = _unshard_params_for_summon
_unshard_params = summon_full_params


def _optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    optim_input: Any,
    rank0_only: bool,
    shard_state: bool,
    group: Any,
    using_optim_input: bool,
    use_orig_params: bool = False,
    cpu_offload: bool = True,
) -> dict[str, Any]:
    return save_full_or_sharded(
        model,
        optim,
        optim_state_dict,
        optim_input,
        rank0_only,
        full_state_dict=not shard_state,
        cpu_offload=cpu_offload,
    )
