"""Sets how the units of a tree accumulate, reduce and clear gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, UsageError
from fsdp_flat.runtime.reduction import LOW_PRECISION_HOOKS
from fsdp_flat.runtime.unit import Unit

__all__ = ["clear_gradients", "set_comm_hook", "set_divide_factor", "without_reduction"]


@contextmanager
def without_reduction(units: Sequence[Unit], mode: str) -> Iterator[None]:
    """Accumulate gradients inside the block: unreduced ones (``"local"``), or reduced shards (``"sharded"``).

    Raises:
        OptionError: another mode.
        PhaseError: inside such a block in its ``"local"`` mode.
    """
    if mode not in ("local", "sharded"):
        raise OptionError(f'no_sync takes mode="local" or mode="sharded"; got {mode!r}.')
    if not all(unit.control.sync_gradients for unit in units):
        raise PhaseError("no_sync was entered inside no_sync; one level is enough.")
    for unit in units:
        unit.control.sync_gradients = mode == "sharded"
    try:
        yield
    finally:
        for unit in units:
            unit.control.sync_gradients = True


def clear_gradients(units: Sequence[Unit], *, set_to_none: bool) -> None:
    """Clear the gradients of the units' parameters, reduced or not."""
    for handle in (handle for unit in units for handle in unit.handles):
        handle.grads.drop()
        for param in handle.views.visible_params():
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.detach().zero_()


def set_comm_hook(units: Sequence[Unit], hook: Callable[..., Any], state: object) -> None:
    """Replace the reduction of gradients by ``hook``; torch's low-precision hooks set the dtype of the reduction.

    Raises:
        PhaseError: there is a hook already.
        OptionError: the hook is not callable.
    """
    policies = [unit.policy for unit in units]
    if any(policy.hook is not None or policy.dtype is not None for policy in policies):
        raise PhaseError("A communication hook is registered already; there can be one.")
    if not callable(hook):
        raise OptionError(f"A communication hook must be callable; got {hook!r}.")
    dtype = LOW_PRECISION_HOOKS.get(hook)
    for policy in policies:
        if dtype is not None:
            policy.dtype = dtype
        else:
            policy.hook, policy.hook_state = hook, state


def set_divide_factor(units: Sequence[Unit], factor: float | torch.Tensor | None) -> None:
    """Divide sums of gradients by ``factor``; None is the number of ranks.

    Raises:
        UsageError: there is a communication hook, which divides by itself.
        OptionTypeError: ``factor`` is neither a number nor a scalar tensor.
        OptionError: it is zero.
    """
    policies = [unit.policy for unit in units]
    if factor is not None:
        if isinstance(factor, bool) or not isinstance(factor, (int, float, torch.Tensor)):
            raise OptionTypeError(f"factor must be a number, a scalar tensor or None; got {factor!r}.")
        if not isinstance(factor, torch.Tensor) and factor == 0:
            raise OptionError("factor must not be zero: the sum of gradients is divided by it.")
        if any(policy.hook is not None for policy in policies):
            raise UsageError(
                "A communication hook divides gradients by itself, so a factor would do nothing. Divide in the "
                "hook, or do without it."
            )
    for policy in policies:
        policy.divide_factor = factor
