"""Optimizer states that are neither a number nor shaped like the parameter: how a caller says what they are.

Adafactor keeps one number a row and one a column, 8-bit optimizers keep blocks. What a rank has of such a state belongs
to its slice of the parameter in a way that only the optimizer's author knows.
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
    """What one rank has of a state.

    Attributes:
        tensor: the state as the rank's optimizer keeps it, of any shape.
        start: first element of the rank's slice of the flattened parameter.
        stop: the element after its last; the slices of all ranks follow on one another.
    """

    tensor: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DeferredState:
    """A merged state that is read when its turn has come to be split, so that no rank has all of them at once.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read: gives it.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class OptimStateHandler:
    """How a state is put together and taken apart.

    Attributes:
        merge: ``merge(parts, shape)`` makes the tensor that is saved of every rank's part. ``parts`` are in the order
            of the slices; ranks that hold no elements, or no such state, are left out. ``shape`` is the parameter's.
        split: ``split(saved, shape, start, stop)`` makes what a rank's optimizer keeps for the elements ``start`` to
            ``stop`` of the flattened parameter.
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
    """Say how an optimizer state that has a shape of its own is saved and loaded.

    Without this such a state is an error when it is first saved. With it, every optimizer state dict of ``model`` has
    the merged tensor, whole, under the state's name; the same name means the same handler for all parameters. Needs
    ``use_orig_params=True`` or units of one parameter: the state of a flat parameter belongs to no single one.

    Every rank must register the same handlers.

    Args:
        model: a wrapped model, or a module that holds wrapped ones.
        name: the state's name in ``optimizer.state[param]``.
        merge: see :class:`OptimStateHandler`; pure, so that every rank gets the same.
        split: its inverse.

    Raises:
        OptionTypeError: (a TypeError) ``merge`` or ``split`` cannot be called, or ``name`` is no string.
        OptionError: (a ValueError) nothing below ``model`` is wrapped.
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
        UnsupportedError: it has.
    """
    entry = handle.views.params[index]
    if entry.adapter.groups:
        raise UnsupportedError(
            f"State {name!r} of {entry.fqn!r} (unit {handle.spec.unit_name!r}) has a handler, which is given slices of "
            "a whole parameter; tensor parallelism has split this one first. Leave the parameter out of tensor "
            "parallelism, or out of the optimizer that keeps such states."
        )
