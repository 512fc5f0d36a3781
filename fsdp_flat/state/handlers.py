"""Registers handlers for optimizer states that are neither scalars nor shaped like the parameter.

Adafactor keeps one number per row and one per column, 8-bit optimizers keep blocks. Only the optimizer's author can
define how a rank's part of such a state corresponds to its slice of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.runtime import units_of

__all__ = ["DeferredState", "OptimStateHandler", "StatePart", "refuse_split", "register_optim_state_handler"]


@dataclass(frozen=True, slots=True)
class StatePart:
    """Holds one rank's part of a state.

    Attributes:
        tensor: the state as the rank's optimizer keeps it, of any shape.
        start: first element of the rank's slice of the flattened parameter.
        stop: the element after its last; the slices of all ranks are contiguous.
    """

    tensor: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DeferredState:
    """Describes a merged state that is read only when it is split, so that no rank holds all of them at once.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read: reads and returns the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class OptimStateHandler:
    """Holds the functions that merge and split one state.

    Attributes:
        merge: ``merge(parts, shape)`` returns the tensor to save, made from every rank's part. ``parts`` are in the
            order of the slices, without ranks that hold no elements or no such state. ``shape`` is the parameter's.
        split: ``split(saved, shape, start, stop)`` returns the state of a rank's optimizer for the elements ``start``
            to ``stop`` of the flattened parameter.
    """

    merge: Callable[[Sequence[StatePart], torch.Size], torch.Tensor]
    split: Callable[[torch.Tensor, torch.Size, int, int], torch.Tensor]


def register_optim_state_handler(
    model: nn.Module,
    name: str,
    *,
    merge: Callable[[Sequence[StatePart], torch.Size], torch.Tensor],
    split: Callable[[torch.Tensor, torch.Size, int, int], torch.Tensor],
) -> None:
    """Register how to save and load an optimizer state that is neither a scalar nor shaped like its parameter.

    Without a handler, saving such a state is an error. With one, every optimizer state dict of ``model`` holds the
    full merged tensor under the state's name. One handler serves all parameters that have a state of this name. Needs
    ``use_orig_params=True`` or units of one parameter: the state of a flat parameter belongs to no single one.

    Every rank must register the same handlers.

    Args:
        model: a wrapped model, or a module that holds wrapped ones.
        name: the state's name in ``optimizer.state[param]``.
        merge: see :class:`OptimStateHandler`; must be pure, so that every rank gets the same result.
        split: the inverse of ``merge``.

    Raises:
        OptionTypeError: (a TypeError) ``merge`` or ``split`` is not callable, or ``name`` is not a string.
        OptionError: (a ValueError) nothing at or below ``model`` is wrapped.
    """
    if not isinstance(name, str) or not callable(merge) or not callable(split):
        raise OptionTypeError(f"A handler has a name and two functions; got {name!r}, {merge!r} and {split!r}.")
    units = units_of(model)
    if not units:
        raise OptionError(
            "register_optim_state_handler takes a wrapped model; nothing at or below this one is wrapped."
        )
    handler = OptimStateHandler(merge, split)
    for unit in units:
        unit.optim_state_handlers[name] = handler


def refuse_split(handle: FlatParamHandle, index: int, name: str) -> None:
    """Raise if tensor parallelism has split the parameter of a state that has a handler.

    Raises:
        UnsupportedError: the parameter is split.
    """
    entry = handle.views.params[index]
    if entry.adapter.groups:
        raise UnsupportedError(
            f"State {name!r} of {entry.fqn!r} (unit {handle.spec.unit_name!r}) has a handler, which is given slices of "
            "a whole parameter; tensor parallelism has split this one first. Leave the parameter out of tensor "
            "parallelism, or out of the optimizer that keeps such states."
        )
